"""``taken_over()``: called before the handler of a row whose last worker did not settle it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import timedelta
from threading import Event
from typing import Any

import pytest
from django.db import connection, transaction
from django.utils import timezone

from dcl_processor import BatchProcessor, Discard, Lease, Snooze
from dcl_processor.engine import heartbeat
from dcl_processor.exceptions import TransactionLeftOpen
from dcl_processor.execution.event_loop import EventLoop
from tests.contract.support import errands as the
from tests.contract.support.clocks import HOUR, Clock
from tests.contract.support.marking import marking
from tests.contract.support.reports import assert_run
from tests.models import Errand

pytestmark = [
    pytest.mark.django_db(transaction=True, databases=["default", "other"]),
    pytest.mark.usefixtures("nothing_is_left"),
]


def left_behind(row: Errand) -> None:
    """Leave the lease of a worker that died an hour ago."""
    before = timezone.now() - timedelta(hours=1)
    Errand.objects.filter(pk=row.pk).update(leased_until=before, attempts=1)


def shows_the_death(row: Errand) -> bool:
    """Tell whether the row shows the next worker that another one had it, and is free."""
    return Errand.objects.get(pk=row.pk).leased_until == Lease(60).taken_away


@pytest.mark.parametrize("size", [1, 10])
def test_it_is_called_before_the_handler_of_that_row_alone(size: int) -> None:
    rows = the.errands(3)
    left_behind(rows[1])
    calls: list[Any] = []
    run = the.at_least_once(
        lambda row: calls.append(row.place),
        taken_over=lambda row: calls.append(("taken over", row.place)),
        batch_size=size,
    )
    assert_run(run(), processed=3)
    assert calls == [0, ("taken over", 1), 1, 2]


def test_a_row_that_was_put_back_is_not_taken_over() -> None:
    the.errands(1)
    calls: list[Any] = []
    options = {"retry": the.retry(), "taken_over": calls.append}
    assert_run(the.at_least_once(the.raising(ValueError()), **options)(), failed=1, to_retry=1)
    assert_run(the.at_least_once(the.ignore, **options)(), processed=1)
    assert calls == []


@pytest.mark.parametrize("is_async", [False, True], ids=["def", "async def"])
def test_a_row_whose_lease_lapses_during_it_is_not_handled(
    is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process was suspended: another worker may have the row by now."""
    taken, other = the.errands(2)
    left_behind(taken)
    clock = Clock()
    monkeypatch.setattr(heartbeat, "time", clock)
    calls: list[Any] = []

    def look(row: Errand) -> None:
        calls.append(("taken over", row.place))
        clock.passed = HOUR

    async def handle_async(row: Errand) -> None:
        calls.append(row.place)

    handler = handle_async if is_async else lambda row: calls.append(row.place)
    run = the.at_least_once(handler, taken_over=look)
    assert_run(run(filter=the.only(taken)), lease_lost=1)
    assert calls == [("taken over", taken.place)]
    assert shows_the_death(taken)
    clock.passed = 0
    assert_run(run(filter=the.only(other)), processed=1)


NOT_NOW = [
    (Snooze(), {"retry": the.retry()}, {"snoozed": 1}, 1),
    (Snooze(), {}, {"snoozed": 1}, 1),
    (Snooze(delay=60), {}, {"failed": 1}, 1),
    (ValueError(), {"retry": the.retry()}, {"failed": 1, "to_retry": 1}, 2),
    (ValueError(), {}, {"failed": 1}, 1),
    (ValueError(), {"get_failed": lambda row, error: {}}, {"failed": 1}, 1),
    (Discard("no"), {}, {"failed": 1}, 1),
    (Discard("no"), {"retry": the.retry()}, {"failed": 1}, 2),
]


@pytest.mark.parametrize("is_async", [False, True], ids=["def", "async def"])
@pytest.mark.parametrize("make", [the.at_least_once, marking], ids=["lease", "mark"])
@pytest.mark.parametrize(("error", "options", "counts", "attempts"), NOT_NOW)
def test_it_is_called_again_if_the_row_stays_pending_by_what_it_raises(
    make: the.Make,
    error: Exception,
    options: dict[str, Any],
    counts: Any,
    attempts: int,
    is_async: bool,
) -> None:
    """Nothing was found out about the worker that died."""
    [row] = the.errands(1)
    left_behind(row)
    calls: list[str] = []

    def look(row: Errand) -> None:
        calls.append("taken over")
        if calls == ["taken over"]:
            raise error

    def handle(row: Errand) -> None:
        calls.append("handled")

    async def handle_async(row: Errand) -> None:
        handle(row)

    options = {"retry": None, "taken_over": look, **options}
    run = make(handle_async if is_async else handle, **options)
    assert_run(run(), **counts)
    assert calls == ["taken over"]
    assert shows_the_death(row)
    said = the.state(row)
    assert (said["attempts"], said["claimed"], said["claimed_at"]) == (attempts, False, False)
    assert_run(run(), processed=1)
    assert calls == ["taken over", "taken over", "handled"]
    assert not the.state(row)["leased_until"]


# --- beside ``process_batch()``: before the call, and for each row alone


Rows = Sequence[Errand]
Hook = Callable[[Errand], None]

each_kind = pytest.mark.parametrize("is_async", [False, True], ids=["def", "async def"])


class Calls:
    """Remembers what was called with which places, in turn; ``hook`` and ``answer`` may raise."""

    def __init__(
        self, hook: Hook = the.ignore, answer: Callable[[Rows], Any] = lambda rows: None
    ) -> None:
        self.hook = hook
        self.answer = answer
        self.made: list[Any] = []

    def taken_over(self, row: Errand) -> None:
        self.made.append(("taken over", row.place))
        self.hook(row)

    def handle(self, rows: Rows) -> Any:
        self.made.append([row.place for row in rows])
        return self.answer(rows)

    def processor(self, *, is_async: bool = False, **options: Any) -> BatchProcessor[Errand]:
        """Make a processor that handles ten rows in one call, unless told otherwise."""

        async def taken_over(row: Errand) -> None:
            self.taken_over(row)

        async def handle(rows: Rows) -> Any:
            return self.handle(rows)

        hooks = (
            {"taken_over": taken_over, "process_batch": handle}
            if is_async
            else {"taken_over": self.taken_over, "process_batch": self.handle}
        )
        return the.at_least_once(the.ignore, **{**hooks, "batch_size": 10, **options})


@each_kind
@pytest.mark.parametrize(
    ("error", "counts", "left"),
    [
        (Discard("it was uploaded"), {"discarded": 1}, {"dead": True, "leased_until": False}),
        (Snooze(), {"snoozed": 1}, {"dead": False, "leased_until": True}),
        (ValueError("no"), {"failed": 1, "to_retry": 1}, {"dead": False, "leased_until": True}),
    ],
    ids=["discard", "snooze", "failure"],
)
def test_what_it_raises_is_the_outcome_of_its_row_which_is_left_out_of_the_call(
    is_async: bool, error: Exception, counts: Any, left: dict[str, bool]
) -> None:
    rows = the.errands(4)
    for row in rows[:2]:
        left_behind(row)

    def look(row: Errand) -> None:
        if row.place == 0:
            raise error

    calls = Calls(look)
    options = {"failed": {"dead": True}, "retry": the.retry()}
    assert_run(calls.processor(is_async=is_async, **options)(), processed=3, **counts)
    assert calls.made == [("taken over", 0), ("taken over", 1), [1, 2, 3]]
    said = the.state(rows[0])
    assert {**said, **left} == said
    assert the.places(done=True, leased_until=None) == [1, 2, 3]


@each_kind
def test_rows_that_are_called_again_alone_are_prepared_once(is_async: bool) -> None:
    rows = the.errands(3)
    left_behind(rows[2])

    def fail(given: Rows) -> None:
        if len(given) > 1:
            raise ValueError

    calls = Calls(answer=fail)
    assert_run(calls.processor(is_async=is_async)(), processed=3)
    assert calls.made == [("taken over", 2), [0, 1, 2], [0], [1], [2]]


@each_kind
def test_a_stop_in_it_keeps_the_call_from_being_made(is_async: bool) -> None:
    """The rows are put back, and the next worker still sees that another one had them."""
    rows = the.errands(3)
    for row in rows[:2]:
        left_behind(row)
    stop = Event()
    calls = Calls(lambda row: stop.set())
    assert_run(calls.processor(is_async=is_async)(stop=stop), stopped="signal")
    assert calls.made == [("taken over", 0)]
    assert [shows_the_death(row) for row in rows] == [True, True, False]
    assert the.untouched(rows[2])


@each_kind
def test_rows_whose_leases_lapse_during_it_are_left_out_of_the_call(
    is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process was suspended: another worker may have the rows by now."""
    rows = the.errands(3)
    for row in rows[:2]:
        left_behind(row)
    clock = Clock()
    monkeypatch.setattr(heartbeat, "time", clock)

    def sleep(row: Errand) -> None:
        clock.passed = HOUR

    calls = Calls(sleep)
    assert_run(calls.processor(is_async=is_async)(), lease_lost=3)
    assert calls.made == [("taken over", 0)]


def test_a_transaction_that_it_leaves_open_fails_its_row_alone() -> None:
    rows = the.errands(3)
    left_behind(rows[1])

    def leave(row: Errand) -> None:
        transaction.atomic().__enter__()
        Errand.objects.filter(pk=row.pk).update(result="worked")

    def look(given: Rows) -> None:
        assert not connection.in_atomic_block

    calls = Calls(leave, look)
    report = calls.processor()()
    assert_run(report, processed=2, failed=1)
    assert calls.made == [("taken over", 1), [0, 2]]
    assert type(report.failures[0].error) is TransactionLeftOpen
    assert the.places(result="worked") == []
    assert shows_the_death(rows[1])


@pytest.mark.parametrize(("concurrency", "number"), [(2, 2), (5, 4)])
def test_asynchronous_ones_are_called_at_once_as_far_as_concurrency_allows(
    concurrency: int, number: int
) -> None:
    rows = the.errands(5)
    for row in rows[:4]:
        left_behind(row)
    now: set[int] = set()
    most: list[int] = []
    calls: list[list[int]] = []
    complete = asyncio.Event()

    async def look(row: Errand) -> None:
        now.add(row.pk)
        most.append(len(now))
        if len(now) == number:
            complete.set()
        async with asyncio.timeout(the.PATIENCE):
            await complete.wait()
        now.discard(row.pk)

    async def handle(given: Rows) -> None:
        assert not now
        calls.append([row.place for row in given])

    run = Calls().processor(is_async=True, taken_over=look, process_batch=handle)
    assert_run(run(concurrency=concurrency), processed=5)
    assert calls == [[0, 1, 2, 3, 4]]
    assert max(most) == number


def test_an_interrupt_behind_an_asynchronous_one_is_not_taken_for_the_end_of_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop returns the outcome once more, because it was not told to forget it."""
    rows = the.errands(3)
    left_behind(rows[0])
    calls = Calls()

    def interrupted(self: EventLoop, pks: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(EventLoop, "forget", interrupted)
        with pytest.raises(KeyboardInterrupt):
            calls.processor(is_async=True)()
    assert calls.made == [("taken over", 0)]
    assert shows_the_death(rows[0])
    assert all(map(the.untouched, rows[1:]))
