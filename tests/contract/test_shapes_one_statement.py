"""Why a spanning question is asked in a second statement, and an own-table one need not be.

Here every shape is claimed as if it asked the row's own columns alone: lock and second check in
*one* statement. Its snapshot is older than its lock, and PostgreSQL looks at nothing but the
locked row again. The harness that finds nothing wrong with the real claim finds the doubles of
this one.
"""

from __future__ import annotations

from typing import Any

import pytest
from django.db import NotSupportedError

from tests import seams
from tests.contract.support.expression_shapes import EXPRESSIONS
from tests.contract.support.gate import other_than, run_and_meanwhile
from tests.contract.support.own_shapes import OWN
from tests.contract.support.shapes import OneStatement, Shape
from tests.contract.support.spanning_shapes import SPANNING
from tests.contract.test_shapes import processor

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

SHAPES = [*OWN, *SPANNING, *EXPRESSIONS]


def of_kind(kind: OneStatement) -> pytest.MarkDecorator:
    shapes = [shape for shape in SHAPES if shape.one_statement is kind]
    return pytest.mark.parametrize("shape", shapes, ids=str)


@pytest.fixture(autouse=True)
def _everything_is_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seams.replace(monkeypatch, seams.IS_OWN_TABLE, lambda queryset: True)


def handled_although_it_left(shape: Shape) -> bool:
    row = shape.make()
    calls: list[Any] = []
    broken = processor(shape, calls)
    broken.repeats = True  # the flip is not judged here
    outsider = other_than(shape.using)

    def act() -> None:
        if shape.leave is not None:
            shape.leave(row.pk, outsider)
        else:
            shape.finish_as_another_copy(row, outsider)

    run_and_meanwhile(lambda: broken(filter=shape.filter), act, using=shape.using)
    assert [each.pk for each in calls] in ([], [row.pk])
    return bool(calls)


@of_kind(OneStatement.DOUBLE)
def test_one_statement_hands_out_what_is_not_pending(shape: Shape) -> None:
    assert handled_although_it_left(shape)


@of_kind(OneStatement.RIGHT)
def test_one_statement_is_enough(shape: Shape) -> None:
    assert not handled_although_it_left(shape)


@of_kind(OneStatement.REFUSED)
def test_one_statement_is_refused_by_the_database(shape: Shape) -> None:
    """FOR UPDATE goes with neither DISTINCT nor GROUP BY."""
    shape.make()
    calls: list[Any] = []
    with pytest.raises(NotSupportedError, match=r"is not allowed with (DISTINCT|GROUP BY) clause"):
        processor(shape, calls)(filter=shape.filter)
    assert calls == []


def test_an_own_table_question_is_never_a_double() -> None:
    """The whitelist holds nothing for which the one statement is wrong."""
    assert {shape.one_statement for shape in OWN} == {OneStatement.RIGHT}
    assert any(shape.one_statement is OneStatement.DOUBLE for shape in SPANNING)
