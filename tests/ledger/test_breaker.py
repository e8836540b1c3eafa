"""The breaker: failures in a row on all machines, a pause, and exactly one row that is tried."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import connection

import dcl_processor.ledger as api
from dcl_processor import Breaker, Report, Snooze, ledger
from dcl_processor.candidates import scan
from dcl_processor.engine.lane import Lane
from dcl_processor.exceptions import InvalidOption
from dcl_processor.ledger import orders
from dcl_processor.ledger import overseer as module
from dcl_processor.ledger.ledger import Ledger
from dcl_processor.ledger.models import Control, ensure
from dcl_processor.ledger.overseer import LOOK
from dcl_processor.oversight import Hold
from dcl_processor.runner.counters import Counters
from tests.contract.support import errands as the
from tests.contract.support.messages import SENDS_SEVERAL
from tests.contract.support.reports import assert_run
from tests.models import Errand
from tests.waiting import PATIENCE

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

NAME = "shop.broken"
LONG_AGO = "2001-01-01T00:00:00Z"


def processor(handler: Any, **options: Any) -> Any:
    options = {"breaker": Breaker(3, pause=600), **options}
    make = options.pop("make", the.transactional)
    return make(handler, name=NAME, **options)


def fail(row: Errand) -> None:
    raise OSError("no route")


def control() -> Control:
    return Control.objects.get(processor=NAME)


def half_open() -> None:
    """Let the pause be over."""
    Control.objects.update(open_until=LONG_AGO)


@pytest.mark.parametrize("make", [the.transactional, the.at_most_once, the.at_least_once])
def test_so_many_failures_in_a_row_open_it_and_no_further_row_starts(make: the.Make) -> None:
    the.errands(10)
    failed = {"failed": {"dead": True}}
    report = processor(fail, make=make, **failed)()
    assert_run(report, failed=3, stopped="breaker")
    assert ledger.state(NAME).breaker == "open"
    assert ledger.state(NAME).failures == 3
    # No other worker starts a row either.
    assert_run(processor(the.ignore, make=make, **failed)(), stopped="breaker")


def test_a_success_in_between_begins_the_count_again() -> None:
    the.errands(8)

    def handle(row: Errand) -> None:
        if row.place != 2:
            raise OSError("no route")

    report = processor(handle)()
    assert_run(report, processed=1, failed=5, stopped="breaker")


def test_a_snooze_neither_counts_nor_begins_again() -> None:
    the.errands(6)

    def handle(row: Errand) -> None:
        raise Snooze() if row.place == 1 else OSError("no route")

    assert_run(processor(handle)(), failed=3, snoozed=1, stopped="breaker")


def test_failures_of_several_runs_count_together() -> None:
    rows = the.errands(3)
    for row in rows[:2]:
        assert_run(processor(fail)(filter=the.only(row)), failed=1)
    assert control().failures == 2
    assert_run(processor(fail)(filter=the.only(rows[2])), failed=1)
    assert ledger.state(NAME).breaker == "open"


def test_it_stays_closed_while_another_machine_succeeds(
    other_machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orders, "RECENT", 600.0)
    the.errands(5)
    ensure(NAME)
    orders.note_success(NAME, other_machine().id)
    assert_run(processor(fail)(), failed=5)
    assert control().open_until is None
    # The success is too old to show anything.
    Control.objects.update(succeeded_at=LONG_AGO)
    assert_run(processor(fail)(), failed=1, stopped="breaker")


def test_after_the_pause_one_row_that_succeeds_closes_it_and_the_run_goes_on() -> None:
    the.errands(5)
    processor(fail)()
    half_open()
    assert ledger.state(NAME).breaker == "half-open"
    assert_run(processor(the.ignore)(), processed=5)
    assert (control().failures, control().open_until) == (0, None)


def test_after_the_pause_one_row_that_fails_opens_it_again() -> None:
    the.errands(5)
    processor(fail)()
    half_open()
    assert_run(processor(fail)(), failed=1, stopped="breaker")
    assert ledger.state(NAME).breaker == "open"


def test_a_batch_tries_one_row_too() -> None:
    the.errands(8)
    processor(fail)()
    half_open()
    assert_run(processor(fail, batch_size=4)(), failed=1, stopped="breaker")


def test_while_one_machine_tries_a_row_no_other_does(ledger: Ledger, other_machine: Any) -> None:
    """The row is in its handler on one machine while another one runs."""
    the.errands(3)
    processor(fail)()
    half_open()
    reports: list[Any] = []

    def handle(row: Errand) -> None:
        # A machine of its own: another process's ledger, on connections of its own.
        from dcl_processor.ledger import ledger as process

        mine, process._ledger = process._ledger, other_machine()
        try:
            reports.append(the.elsewhere(processor(the.ignore)))
        finally:
            process._ledger = mine

    assert_run(processor(handle)(limit=1), processed=1, stopped="limit")
    assert_run(reports[0], stopped="breaker")


def test_a_worker_that_dies_while_it_tries_a_row_keeps_the_others_waiting_for_a_pause() -> None:
    ensure(NAME)
    half_open()
    assert orders.take_probe(NAME, Breaker())
    assert not orders.take_probe(NAME, Breaker())
    half_open()
    assert orders.take_probe(NAME, Breaker())


def test_a_run_that_finds_no_row_to_try_lets_another_one_try() -> None:
    ensure(NAME)
    half_open()
    assert_run(processor(the.ignore)())
    assert ledger.state(NAME).breaker == "half-open"


def test_a_short_pause_is_waited_for_within_the_run() -> None:
    the.errands(4)
    calls: list[int] = []

    def handle(row: Errand) -> None:
        calls.append(row.place)
        if len(calls) <= 2:
            raise OSError("no route")

    report = processor(handle, breaker=Breaker(2, pause=1))()
    assert_run(report, processed=2, failed=2)
    assert report.duration >= 1


def test_a_run_does_not_wait_without_end_for_a_row_that_another_machine_tries(
    overseer: Any, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pause begins again for as long as the row takes."""
    clock = SimpleNamespace(now=1_000.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    assert orders.take_probe(NAME, Breaker()) is False
    half_open()
    assert orders.take_probe(NAME, Breaker(3, pause=600))
    ledger.read([NAME])
    assert overseer.hold().wait > 500
    clock.now += 700
    orders.set_probe(NAME, 600)
    ledger.read([NAME])
    assert overseer.hold() == Hold("breaker")


if connection.vendor != "mysql":  # keys are refused there

    def test_a_pause_after_a_batch_of_several_keys_is_waited_for_as_well() -> None:
        the.errands(8)
        calls: list[int] = []

        async def handle(row: Errand) -> None:
            calls.append(row.place)
            if len(calls) <= 4:
                raise OSError("no route")

        options: dict[str, Any] = {"make": the.at_least_once, "group_by": "place"}
        run = processor(handle, breaker=Breaker(2, pause=1), **options)
        report = run(concurrency=3, timeout=PATIENCE)
        assert_run(report, processed=8 - report.failed, failed=report.failed)
        assert report.failed >= 3


def test_an_operator_closes_it_or_lets_a_row_be_tried_at_once() -> None:
    the.errands(4)
    processor(fail)()
    ledger.run_now(NAME)
    assert ledger.state(NAME).breaker == "half-open"
    assert_run(processor(fail)(), failed=1, stopped="breaker")
    assert ledger.resume(NAME)
    assert ledger.state(NAME).breaker == "closed"


@pytest.fixture
def overseer(ledger: Ledger) -> Iterator[Any]:
    """Give the overseer of a run that is at work."""
    ensure(NAME)
    run = processor(the.ignore)
    found = ledger.of_run(run, Counters(run), hands_out=False)
    yield found
    found.end(Report(name=NAME), None)


def test_a_handler_that_takes_longer_than_the_pause_is_still_the_only_one(
    ledger: Ledger, overseer: Any
) -> None:
    half_open()
    ledger.read([NAME])
    assert (overseer.hold(), overseer.take(1)) == (None, 1)
    half_open()
    overseer.tick()
    assert api.state(NAME).breaker == "open"
    api.resume(NAME)
    overseer.tick()
    assert api.state(NAME).breaker == "closed"


def test_a_row_that_started_before_is_not_taken_for_the_one_that_is_tried(
    ledger: Ledger, overseer: Any
) -> None:
    """It may end while the other one is at work: one more row would be tried, or all of them."""
    assert (overseer.hold(), overseer.take(1)) == (None, 1)
    half_open()
    ledger.read([NAME])
    hold = overseer.hold()
    assert (hold.stopped, hold.wait) == ("breaker", LOOK)
    overseer.note("processed")
    overseer.give_back(0, overseer.window)
    assert ledger.orders[NAME].opens_in is not None
    assert (overseer.hold(), overseer.take(4)) == (None, 1)
    assert overseer.take(4) == 0
    overseer.give_back(1, overseer.window)  # it was not pending any more
    assert (overseer.hold(), overseer.take(4)) == (None, 1)


def test_an_interrupt_while_its_try_is_given_up_ends_the_run_in_the_ledger(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    ensure(NAME)
    run = processor(the.ignore)
    overseer = ledger.of_run(run, Counters(run), hands_out=False)
    half_open()
    ledger.read([NAME])
    assert overseer.hold() is None

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(overseer, "_change", interrupt)
    with pytest.raises(KeyboardInterrupt):
        overseer.end(Report(name=NAME), None)
    assert ledger._records == []


if SENDS_SEVERAL:  # elsewhere each COMMIT is sent at once

    def test_a_run_ends_whose_last_commit_was_sent_before_another_machine_opens_it(
        ledger: Ledger, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Race: the COMMIT waits, is sent before the next read, and is not counted yet."""
        monkeypatch.setattr(scan, "WINDOW", 2)
        the.errands(3)
        processor(fail)()
        opened = Control.objects.values("failures", "open_until").get(processor=NAME)
        api.resume(NAME)
        Errand.objects.all().delete()
        the.errands(6)
        handled: list[int] = []
        real = Lane.settle

        def settle(self: Lane) -> None:
            waited = self._after is not None
            real(self)
            if waited and len(handled) == 4:
                Control.objects.filter(processor=NAME).update(**opened)
                ledger.read([NAME])

        monkeypatch.setattr(Lane, "settle", settle)
        report = processor(lambda row: handled.append(row.pk)).run(timeout=20)
        assert_run(report, processed=4, stopped="breaker")


def test_reserve_hands_out_nothing_while_it_is_open() -> None:
    the.errands(4)
    pack = processor(fail, make=the.at_least_once)
    pack()
    assert pack.reserve() == []


def test_a_breaker_says_what_it_takes() -> None:
    with pytest.raises(InvalidOption, match="failures to be a whole number of rows from 1"):
        Breaker(0)
    with pytest.raises(InvalidOption, match="pause to be a number of seconds from 1"):
        Breaker(3, pause=0)
    with pytest.raises(InvalidOption, match="expected breaker to be a Breaker"):
        processor(fail, breaker=3)
