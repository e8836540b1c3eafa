"""Variants of the package that are wrong, each of which the search has to find."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from django.db.models import Q

from dcl_processor.candidates import pending
from dcl_processor.definition.definition import Definition
from tests.contract.gate import HAS_GATE


def no_second_check(patch: pytest.MonkeyPatch) -> None:
    """Lock the row, and hand it out."""
    patch.setattr(pending.Question, "narrowed", lambda self, rows: self.table.filter(rows))


def one_statement(patch: pytest.MonkeyPatch) -> None:
    """Lock and ask in one statement, whatever is asked."""
    patch.setattr(pending, "is_own_table", lambda queryset: True)


def flip_by_save(patch: pytest.MonkeyPatch) -> None:
    """Write every column that the instance holds, as ``save()`` does."""
    get_done = Definition.get_done

    def get_all(self: Any, row: Any, result: Any) -> Mapping[str, Any]:
        fields = [f for f in row._meta.concrete_fields if not (f.primary_key or f.generated)]
        held = {f.attname: vars(row)[f.attname] for f in fields if f.attname in vars(row)}
        return {**held, **get_done(self, row, result)}

    patch.setattr(Definition, "get_done", get_all)


def forgotten_filter(patch: pytest.MonkeyPatch) -> None:
    """Lose the first of several conditions when the question is narrowed."""

    def narrowed(self: Any, rows: Q) -> Any:
        queryset = self.queryset.all()
        children = queryset.query.where.children
        queryset.query.where.children = children[1:] or children
        return queryset.filter(rows).order_by()

    patch.setattr(pending.Question, "narrowed", narrowed)


BROKEN: list[Callable[[pytest.MonkeyPatch], None]] = [
    no_second_check,
    flip_by_save,
    forgotten_filter,
    # Elsewhere a locking statement reads the newest version of what is joined as well.
    *([one_statement] if HAS_GATE else []),
]
