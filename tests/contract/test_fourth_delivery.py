"""A fourth delivery costs a function and a line, and has the promises of its steps."""

from __future__ import annotations

from typing import Any

import pytest

from dcl_processor.engine.context import Context
from dcl_processor.engine.deliveries import DELIVERIES
from dcl_processor.engine.marked import claim_and_mark, hand_out, settle_next
from dcl_processor.engine.rows import Batch
from dcl_processor.exceptions import InvalidOption
from dcl_processor.options.kinds import USES
from tests.contract.support import errands as the
from tests.contract.support.reports import assert_run
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True)


def in_rounds(run: Context, batch: Batch) -> None:
    """Lock and check again → lease → commit → work → settle all, before any other is claimed."""
    claim_and_mark(run, batch)
    hand_out(run, batch)
    while run.calls or run.unsettled:
        settle_next(run)


@pytest.fixture(autouse=True)
def _added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DELIVERIES, "in_rounds", in_rounds)
    monkeypatch.setitem(USES, "in_rounds", frozenset({"lease"}))


def made(handler: Any, **options: Any) -> Any:
    return the.at_least_once(handler, delivery="in_rounds", batch_size=3, **options)


def test_its_rows_are_handled_in_its_order() -> None:
    the.errands(7)
    done: list[list[int]] = []
    process = the.proven(
        made(lambda row: done.append(the.elsewhere(lambda: the.places(done=True))))
    )
    done.clear()
    assert_run(process(), processed=7)
    # A row is settled when its handler has ended, and so are all of a round before the next one.
    assert [len(each) for each in done] == [*range(7)]


def test_it_has_the_promises_of_its_steps() -> None:
    """A row that fails is tried again; one that another worker has taken over is left to it."""
    the.errands(7)

    def handle(row: Errand) -> None:
        if row.place == 1 and row.attempts == 1:
            raise ConnectionError
        if row.place == 4:
            mine = Errand.objects.filter(pk=row.pk)
            the.elsewhere(lambda: mine.update(leased_until=None))

    assert_run(made(handle, retry=the.retry())(), processed=5, failed=1, to_retry=1, lease_lost=1)
    assert the.places(done=False) == [1, 4]


def test_it_takes_the_options_that_its_line_names() -> None:
    with pytest.raises(InvalidOption, match="expected no claim with IN_ROUNDS"):
        made(the.ignore, claim={"claimed": True}, reset={"claimed": False})
