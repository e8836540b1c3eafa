"""AT_MOST_ONCE: claimed and committed before the work, and repeated only by an operator."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connection
from django.db.models import F
from django.db.models.functions import Now
from django.test.utils import CaptureQueriesContext

from dcl_processor.exceptions import InvalidDone, StillPending
from tests.contract.support import errands as the
from tests.contract.support.gate import HAS_GATE
from tests.contract.support.reports import assert_run
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


@the.each_question
@the.each_size
def test_the_claim_is_committed_before_the_handler_is_called(question: Any, size: int) -> None:
    rows = the.errands(5)
    seen: list[Any] = []

    def look(row: Errand) -> None:
        assert not connection.in_atomic_block
        other = Errand.objects.using("other").get(pk=row.pk)
        seen.append((other.claimed, other.claimed_at is not None, other.done))
        assert (row.claimed, row.claimed_at) == (True, other.claimed_at)

    report = the.at_most_once(look, pending=question, batch_size=size)()
    assert_run(report, processed=5)
    assert seen == [(True, True, False)] * 5
    expected = {**the.state(rows[0]), "done": True, "claimed": True, "claimed_at": False}
    assert [the.state(row) for row in rows] == [expected] * 5


@pytest.mark.parametrize("reset", [None, {"claimed": False}], ids=["no reset", "reset"])
def test_without_failed_a_row_that_failed_stays_to_be_seen(reset: Any) -> None:
    """Nothing could say that it failed, so that it must not look settled."""
    [row] = the.errands(1)
    run = the.at_most_once(the.raising(ValueError()), reset=reset)
    assert_run(run(), failed=1)
    assert the.state(row)["claimed"]
    assert list(run.in_doubt(older_than=0)) == [row]
    assert_run(run())


MEANWHILE = {
    "cleared": lambda rows: rows.update(claimed=False, claimed_at=None),
    "marked done": lambda rows: rows.update(done=True, claimed_at=None, result="by hand"),
    "claimed again": lambda rows: rows.update(claimed=True, claimed_at=Now()),
}


@pytest.mark.parametrize("act", MEANWHILE.values(), ids=MEANWHILE)
@pytest.mark.parametrize("fails", [False, True], ids=["handled", "failed"])
@pytest.mark.parametrize("rehearsed", [False, True], ids=["first row", "later row"])
def test_what_somebody_did_meanwhile_is_not_overwritten(
    act: Any, fails: bool, rehearsed: bool
) -> None:
    rows = the.errands(2 if rehearsed else 1)
    after: dict[str, Any] = {}

    def handle(row: Errand) -> None:
        if row.pk != rows[-1].pk:
            return
        mine = Errand.objects.using("other").filter(pk=row.pk)
        act(mine)
        after.update(mine.values().get())
        if fails:
            raise ValueError

    report = the.at_most_once(handle, failed={"dead": True, "result": "failed"})()
    assert_run(report, processed=len(rows) - 1, lease_lost=1)
    assert Errand.objects.filter(pk=rows[-1].pk).values().get() == after


def test_a_claim_by_expression_is_recognised_by_what_it_wrote() -> None:
    [row] = the.errands(1)

    def handle(row: Errand) -> None:
        Errand.objects.using("other").filter(pk=row.pk).update(place=F("place") + 1)

    run = the.at_most_once(
        handle,
        pending=Errand.objects.filter(place=0, done=False),
        claim={"place": F("place") + 1, "claimed": True},
        claimed_at=None,
    )
    assert_run(run(), lease_lost=1)
    assert not the.state(row)["done"]


def test_a_flip_that_takes_the_claim_back_is_found_before_any_handler() -> None:
    [row] = the.errands(1)
    calls: list[int] = []
    run = the.at_most_once(
        lambda row: calls.append(row.pk),
        pending=Errand.objects.filter(place=0),
        claim={"place": 5},
        claimed_at=None,
        done={"place": F("place") - 5, "done": True},
    )
    with pytest.raises(StillPending, match=f"row {row.pk} still pending after it"):
        run()
    assert calls == []
    assert the.untouched(row)
    assert Errand.objects.get().place == 0


def test_a_reset_that_does_not_put_the_row_back_is_found_before_any_handler() -> None:
    [row] = the.errands(1)
    calls: list[int] = []
    run = the.at_most_once(lambda row: calls.append(row.pk), reset={"result": ""})
    with pytest.raises(InvalidDone, match=f"back into pending, got row {row.pk} not pending after"):
        run()
    assert calls == []
    assert the.untouched(row)


if HAS_GATE:

    def test_nothing_but_the_claim_is_sent_for_a_batch() -> None:
        """No BEGIN, no COMMIT: in autocommit, each is a round trip of its own."""
        the.errands(6)
        run = the.at_most_once(the.ignore, batch_size=3, claim=None, claimed_at=None)
        with CaptureQueriesContext(connection) as queries:
            run()
        kinds = [query["sql"].split()[0] for query in queries]
        tried = max(
            at for at, kind in enumerate(kinds) if kind in {"COMMIT", "ROLLBACK", "RELEASE"}
        )
        assert {*kinds[tried + 1 :]} == {"WITH"}
