"""AT_LEAST_ONCE: leased and committed before the work, settled if the lease is still held."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connection

from dcl_processor import Report, Snooze
from tests.contract.support import errands as the
from tests.contract.support.gate import run_and_meanwhile
from tests.contract.support.reports import assert_run
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

QUESTIONS = {
    "own": lambda: the.PENDING,
    "spanning": lambda: the.PENDING.filter(pk__in=Errand.objects.filter(done=False).values("pk")),
}
each_question = pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS)
each_size = pytest.mark.parametrize("size", [1, 3])


@each_question
@each_size
def test_lease_and_attempt_are_committed_before_the_handler(question: Any, size: int) -> None:
    rows = the.errands(5)
    seen: list[Any] = []

    def look(row: Errand) -> None:
        assert not connection.in_atomic_block
        other = Errand.objects.using("other").get(pk=row.pk)
        assert (row.attempts, row.leased_until) == (other.attempts, other.leased_until)
        seen.append((other.attempts, other.leased_until is not None, other.done))

    run = the.at_least_once(look, pending=question, batch_size=size, retry=the.retry())
    report = run()
    assert_run(report, processed=5)
    assert seen == [(1, True, False)] * 5
    expected = {**the.state(rows[0]), "done": True, "attempts": 0, "leased_until": False}
    assert [the.state(row) for row in rows] == [expected] * 5


@each_question
@each_size
@pytest.mark.parametrize("at", [0, 1], ids=["first batch", "later batch"])
def test_racing_copies_call_one_handler_for_each_row(question: Any, size: int, at: int) -> None:
    """The second copy runs in full between the first one's snapshot and its lock."""
    rows = the.errands(6)
    handled: list[Any] = []

    def run(using: str) -> Report:
        copy = the.at_least_once(
            lambda row: handled.append(row.pk), pending=question, using=using, batch_size=size
        )
        return copy()

    reports: list[Report] = []
    first = run_and_meanwhile(lambda: run("default"), lambda: reports.append(run("other")), at=at)
    reports.append(first)
    assert sorted(handled) == [row.pk for row in rows]
    assert sum(report.processed for report in reports) == 6
    assert not any(report.failed or report.lease_lost for report in reports)


def test_a_failure_is_noted_and_frees_the_lease() -> None:
    [row] = the.errands(1)

    def fail(row: Errand) -> None:
        raise ValueError("no such place")

    run = the.at_least_once(fail, retry=the.retry(), failed={"dead": True})
    for attempt in (1, 2, 3):
        assert_run(run(), failed=1, to_retry=int(attempt < 3))
        said = the.state(row)
        assert (said["attempts"], said["leased_until"], said["dead"]) == (
            attempt,
            False,
            attempt == 3,
        )
    assert Errand.objects.get().last_error == "ValueError: no such place"
    assert_run(run())


def test_snooze_costs_no_attempt_and_frees_the_lease() -> None:
    [row] = the.errands(1)

    def snooze(row: Errand) -> None:
        raise Snooze("closed", delay=3600)

    run = the.at_least_once(snooze, retry=the.retry())
    assert_run(run(), snoozed=1)
    assert the.untouched(row)
    assert_run(run())


@the.each_delivery
@pytest.mark.parametrize("size", [1, 3])
def test_a_column_that_the_question_leaves_out_stays_out_of_every_instance(
    make: Any, size: int
) -> None:
    """The mark's own included: a save() by the handler is not to write them."""
    the.errands(7)
    loaded: list[set[str]] = []

    def look(row: Errand) -> None:
        loaded.append(vars(row).keys() & {field.attname for field in Errand._meta.fields})

    assert_run(
        make(look, pending=the.PENDING.only("place", "done"), batch_size=size)(), processed=7
    )
    assert loaded == [{"id", "place", "done"}] * 7


def test_the_result_is_written_with_the_flip() -> None:
    [row] = the.errands(1)
    run = the.at_least_once(
        lambda row: f"number {row.place}",
        done=lambda row, result: {"done": True, "result": result},
    )
    assert_run(run(), processed=1)
    assert the.state(row)["result"] == "number 0"
