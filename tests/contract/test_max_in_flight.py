"""``max_in_flight``: so many rows are in flight at a time, over all workers."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from functools import partial
from threading import Event
from typing import Any

import pytest
from django.db import connection

from dcl_processor.exceptions import Unsupported
from tests.contract.support import errands as the
from tests.contract.support.groups import at_work
from tests.contract.support.reports import assert_run
from tests.models import Errand
from tests.waiting import PATIENCE, wait

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


def capped(handler: Any, make: the.Make, most: int = 1, **options: Any) -> Any:
    """Make a worker of its own: another instance of the processor that has this name."""
    return make(handler, name="shop.capped", max_in_flight=most, **options)


if connection.vendor == "mysql":

    @pytest.mark.parametrize("make", [the.transactional, the.at_least_once])
    def test_without_advisory_locks_of_a_transaction_it_is_refused(make: the.Make) -> None:
        the.errands(1)
        with pytest.raises(Unsupported, match="expected max_in_flight on PostgreSQL or SQLite"):
            capped(the.ignore, make)()


if connection.vendor == "postgresql":
    each = pytest.mark.parametrize("make", [the.transactional, the.at_least_once])

    def all_at_work(make: the.Make, most: int) -> ExitStack:
        """Have as many workers as may be in the handler of one row each."""
        with ExitStack() as workers:
            for _ in range(most):
                worker = partial(at_work, lambda _, handler: capped(handler, make, most))
                workers.enter_context(worker("", wait_for_locked=PATIENCE))
            return workers.pop_all()

    @each
    @pytest.mark.parametrize("most", [1, 2])
    def test_a_run_ends_as_busy_while_all_places_are_taken(make: the.Make, most: int) -> None:
        the.errands(4)
        with all_at_work(make, most):
            report = capped(the.ignore, make, most)(wait_for_locked=0)
            assert report.stopped == "busy"
            assert (report.processed, report.failed, report.ok) == (0, 0, True)
        assert_run(capped(the.ignore, make, most)(), processed=4 - most)

    class Asked:
        """A gate that tells that a run asks again, after it has found no place."""

        def __init__(self) -> None:
            self.times, self.again = 0, Event()

        def may_start(self, n: int) -> int:
            self.times += 1
            if self.times > 1:
                self.again.set()
            return n

        def ended(self, outcomes: Any) -> None:
            """Take no note."""

    @each
    def test_a_run_waits_for_a_place(make: the.Make) -> None:
        the.errands(3)
        gate = Asked()
        run = partial(capped(the.ignore, make, gates=[gate]), wait_for_locked=PATIENCE)
        with ExitStack() as after, all_at_work(make, 1):
            reports = after.enter_context(the.meanwhile(run))
            wait(gate.again)
        # The other worker's row may end after the run has read it, and is stale then.
        report = reports[0]
        assert (report.processed, report.failed, report.stopped) == (2, 0, "drained")

    def test_async_handlers_of_one_run_are_no_more_than_that() -> None:
        the.errands(12)
        at_once, most = 0, 0

        async def handle(_: Errand) -> None:
            nonlocal at_once, most
            at_once += 1
            most = max(most, at_once)
            await asyncio.sleep(0.01)
            at_once -= 1

        report = capped(handle, the.at_least_once, 2)(concurrency=6)
        assert_run(report, processed=12)
        assert most <= 2
