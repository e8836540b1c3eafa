"""A lease that lapses: behind a lock, with its worker, or because no heartbeat is left."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import ExitStack
from datetime import UTC, datetime
from threading import Event, current_thread
from typing import Any

import pytest
from django.db import connection
from django.db.backends.signals import connection_created
from django.db.models.functions import Now

from dcl_processor import Lease
from tests.contract.support import errands as the
from tests.contract.support.deadlocks import wait_until_a_session_waits
from tests.contract.support.groups import at_work
from tests.contract.support.reports import assert_run
from tests.contract.support.sessions import uncommitted
from tests.models import Errand
from tests.waiting import until

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

LONG_AGO = datetime(2026, 1, 1, tzinfo=UTC)


def has_lapsed() -> bool:
    return Errand.objects.filter(leased_until__lt=Now()).exists()


if connection.vendor == "postgresql":

    def test_a_lease_that_lapses_behind_a_lock_is_renewed_before_another_worker_comes() -> None:
        """The heartbeat waits for the lock; a worker that passes locked rows by does not."""
        [row] = the.errands(1)

        def make(_: str, handler: Any) -> Any:
            return the.at_least_once(handler, lease=Lease(1))

        with at_work(make, "") as handled:
            with uncommitted(lambda: Errand.objects.update(code="x")):
                until(has_lapsed, "the end of the lease")
                wait_until_a_session_waits()
            until(lambda: not has_lapsed(), "the renewal")
            assert_run(make("", the.raising(AssertionError()))(wait_for_locked=0))
        assert handled == [row.pk]
        assert the.state(row)["done"]

    def test_rows_that_are_locked_at_their_settlement_do_not_hold_up_the_others() -> None:
        the.errands(40)
        calls, has_called = Counter[int](), Event()

        def handle(rows: list[Errand]) -> None:
            calls.update(row.place for row in rows)
            if not has_called.is_set():
                first = Errand.objects.filter(place__lt=12).order_by().select_for_update()
                locks.enter_context(uncommitted(lambda: list(first.values_list("pk"))))
                has_called.set()

        run = the.at_least_once(the.ignore, process_batch=handle, lease=Lease(2), batch_size=40)
        with ExitStack() as locks, the.meanwhile(run) as results:
            the.wait(has_called)
            until(lambda: [run(), *results][1:], "the end of the first run")
        assert {place for place, number in calls.items() if number > 1 and place >= 12} == set()


def test_a_row_of_a_worker_that_is_gone_is_handled_with_no_other_in_flight() -> None:
    """It may end this process, too, and must not take the others' attempts with it."""
    the.errands(510)  # of which a run reads 500 at a time
    Errand.objects.filter(place=0).update(leased_until=LONG_AGO, attempts=1)
    in_flight: set[int] = set()
    beside: list[set[int]] = []

    async def handle(row: Errand) -> None:
        in_flight.add(row.place)
        if 0 in in_flight:
            beside.append({*in_flight})
        # Long enough for any other to begin; 499 comes right before it.
        await asyncio.sleep(0.2 if row.place in (0, 499) else 0)
        in_flight.discard(row.place)

    pending = the.PENDING.order_by("place")  # a run that spreads may read it in its last window
    make = the.at_least_once(handle, pending=pending, retry=the.retry())
    assert_run(make(concurrency=5), processed=510)
    assert beside == [{0}]


# Where the run does not take the exit over, it ends the thread alone.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_run_whose_heartbeat_has_ended_starts_no_further_row() -> None:
    the.errands(5)
    ended = Event()

    def end_heartbeat(**_: Any) -> None:
        if current_thread().name.endswith(": leases"):
            ended.set()
            raise SystemExit

    def handle(row: Errand) -> None:
        the.wait(ended)
        until(lambda: not [each for each in the.our_threads() if "leases" in each], "its end")

    connection_created.connect(end_heartbeat, weak=False)
    try:
        report = the.at_least_once(handle, lease=Lease(3))()
    finally:
        connection_created.disconnect(end_heartbeat)
    assert report.stopped == "failures"
    assert len(the.places(done=True)) == 1
    assert not Errand.objects.filter(done=False).exclude(leased_until=None).exists()


def test_a_row_whose_lease_has_lapsed_is_claimed_alone() -> None:
    """It may have killed its process, and costs the rows beside it no attempt."""
    the.errands(4, attempts=1, leased_until=LONG_AGO)
    seen: list[list[int]] = []

    def handle(row: Errand) -> None:
        others = Errand.objects.filter(done=False).exclude(pk=row.pk)
        seen.append([*others.values_list("attempts", flat=True)])

    run = the.at_least_once(handle, retry=the.retry(), batch_size=10)
    assert_run(run(), processed=4)
    assert seen == [[1] * 3, [1] * 2, [1], []]
