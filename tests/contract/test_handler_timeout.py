"""``handler_timeout``: a handler that takes too long is interrupted, and its row has failed."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from django.db import connection, connections, transaction

from dcl_processor import Lease, Snooze
from dcl_processor.engine import recovery
from dcl_processor.engine.settlement import Claimed, Missed
from dcl_processor.exceptions import HandlerTimeout, InsideTransaction, Unsupported
from dcl_processor.execution import calls, time_limit
from dcl_processor.report.interrupts import HandlerCancelled
from tests.contract.support import errands as the
from tests.contract.support.batches import note, sent, worked
from tests.contract.support.heartbeat import until
from tests.contract.support.parcels import in_batches, parcels
from tests.contract.support.reports import assert_run
from tests.models import Errand, Parcel

pytestmark = [pytest.mark.django_db(transaction=True, databases=["default", "other"])]

POSTGRESQL = connection.vendor == "postgresql"

#: Seconds: a limit that is reached, and one that is not.
SOON, NEVER = 0.2, 30.0

#: Seconds in which a lease of one second that is not renewed surely lapses.
LAPSES = 20.0


#: The threads whose handler hangs.
HANGING: set[int] = set()


@contextmanager
def hanging() -> Iterator[None]:
    HANGING.add(threading.get_ident())
    try:
        yield
    finally:
        HANGING.discard(threading.get_ident())


def hang() -> None:
    """Wait in C, as a handler does whose service does not answer."""
    with hanging():
        threading.Event().wait(the.PATIENCE)


@pytest.fixture
def only_who_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupt a call when it hangs, or is over: on a busy machine others take as long."""
    interrupt = time_limit._Watched.interrupt

    def when_it_hangs(watched: time_limit._Watched) -> None:
        if watched.thread in HANGING or watched.is_over:
            interrupt(watched)
        else:
            watched.due = time.monotonic() + 0.01  # looked at again

    monkeypatch.setattr(time_limit._Watched, "interrupt", when_it_hangs)


def hang_first(row: Errand) -> None:
    if row.place == 0:
        hang()


@the.all_deliveries
def test_a_row_whose_handler_takes_too_long_fails_and_the_others_are_handled(
    make: the.Make,
) -> None:
    the.errands(3)
    report = make(hang_first, handler_timeout=SOON)()
    assert_run(report, processed=2, failed=1)
    [failure] = report.failures
    assert isinstance(failure.error, HandlerTimeout)
    assert failure.error.seconds == SOON
    assert not issubclass(HandlerCancelled, Exception)  # which many handlers swallow
    assert "in hang" in failure.traceback  # where it was interrupted
    assert "handler_timeout=0.2 seconds" in str(failure.error)
    assert calls.under_way() == []


@the.all_deliveries
def test_a_plain_handler_is_limited_in_the_main_thread_alone(make: the.Make) -> None:
    """A signal ends the wait of no other thread."""
    the.errands(4)
    called: list[int] = []
    run = make(lambda row: called.append(row.pk), handler_timeout=NEVER)
    words = r"expected handler_timeout with a plain handler in the main thread and concurrency=1, "
    with pytest.raises(Unsupported, match=f"{words}got the thread '"):
        the.elsewhere(run)
    if make is not the.transactional:
        with pytest.raises(Unsupported, match=f"{words}got concurrency=2; write an async handler"):
            run(concurrency=2)
    assert called == []
    assert the.places(done=False, leased_until=None, claimed_at=None) == [0, 1, 2, 3]
    assert_run(run(), processed=4)


@the.each_delivery
def test_an_async_handler_is_limited_in_any_thread(make: the.Make) -> None:
    the.errands(4)

    async def handle(row: Errand) -> None:
        if row.place == 1:
            await asyncio.sleep(the.PATIENCE)

    run = make(handle, handler_timeout=SOON)
    report = the.elsewhere(lambda: run(concurrency=2))
    assert_run(report, processed=3, failed=1)
    assert isinstance(report.failures[0].error, HandlerTimeout)
    assert the.places(done=True) == [0, 2, 3]


def returns(row: Any) -> None:
    """Go on as if nothing had happened."""


def fails(row: Any) -> None:
    raise ValueError("the service has not answered")


def snoozes(row: Any) -> None:
    raise Snooze(delay=60)


def exits(row: Any) -> None:
    raise SystemExit(1)


def groups(row: Any) -> None:
    raise BaseExceptionGroup("tasks", [HandlerCancelled()])


@pytest.mark.parametrize("then", [returns, fails, snoozes, exits, groups])
@the.all_deliveries
def test_whatever_a_handler_makes_of_the_interrupt_its_row_has_failed(
    make: the.Make, then: Callable[[Any], None]
) -> None:
    the.errands(2)

    def handle(row: Errand) -> None:
        try:
            hang_first(row)
        except HandlerCancelled:
            then(row)

    report = make(handle, handler_timeout=SOON)()
    assert_run(report, processed=1, failed=1)
    assert isinstance(report.failures[0].error, HandlerTimeout)


@pytest.mark.parametrize("then", [returns, fails])
def test_whatever_an_asynchronous_handler_makes_of_it_its_row_has_failed(
    then: Callable[[Any], None],
) -> None:
    the.errands(2)

    async def handle(row: Errand) -> None:
        try:
            await asyncio.sleep(the.PATIENCE if row.place == 0 else 0)
        except asyncio.CancelledError:
            then(row)

    report = the.at_least_once(handle, handler_timeout=SOON)()
    assert_run(report, processed=1, failed=1)
    assert isinstance(report.failures[0].error, HandlerTimeout)


def test_a_handler_that_goes_on_is_interrupted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_limit, "GRACE", SOON)
    the.errands(1)
    interrupts: list[None] = []

    def handle(row: Errand) -> None:
        while len(interrupts) < 3:
            try:
                hang()
            except HandlerCancelled:
                interrupts.append(None)

    report = the.transactional(handle, handler_timeout=SOON)()
    assert_run(report, failed=1)
    assert len(interrupts) == 3


def test_an_interrupt_on_its_way_when_the_handler_returns_hits_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Interleaving: the other thread is about to interrupt; the handler returns; it interrupts."""
    limit = time_limit.TimeLimit(0.05, "late")
    on_its_way = threading.Event()
    raise_in = time_limit._raise_in

    def late(thread: int, error: type[BaseException]) -> None:
        if error is HandlerCancelled:
            watched = limit._watched
            assert watched is not None
            on_its_way.set()
            while not watched.is_over:
                time.sleep(0.001)
        raise_in(thread, error)

    monkeypatch.setattr(time_limit, "_raise_in", late)
    call = calls.Call("late", [1], limit)
    calls.begin(call)
    try:
        with pytest.raises(HandlerTimeout):
            limit.keep(call, on_its_way.wait, the.PATIENCE)
        assert sum(range(100_000)) == 4_999_950_000  # steps at which it would be raised
        call.since = time.monotonic()
        assert limit.keep(call, int, "5") == 5
    finally:
        calls.end(call)
        limit.close()


def test_an_interrupt_of_a_call_that_is_over_is_not_sent() -> None:
    watched = time_limit._Watched(due=0.0)
    watched.end()
    the.elsewhere(watched.interrupt)
    assert watched.was_sent is False


@pytest.mark.usefixtures("only_who_hangs")
@pytest.mark.parametrize("several", [False, True])
def test_i7_the_work_of_an_interrupted_row_is_rolled_back(several: bool) -> None:
    parcels(4)
    calls_of: list[int] = []

    def handle(row: Parcel) -> None:
        calls_of.append(row.priority)
        note(row)
        if row.priority == 2:
            hang()

    report = in_batches(handle, batch_size=4 if several else 1, handler_timeout=SOON)()
    assert_run(report, processed=3, failed=1)
    assert isinstance(report.failures[0].error, HandlerTimeout)
    assert sent() == worked() == [0, 1, 3]
    assert calls_of.count(2) == 1


@pytest.mark.usefixtures("only_who_hangs")
def test_i7_an_interrupt_inside_atomic_blocks_leaves_no_transaction_open() -> None:
    parcels(3)

    def handle(row: Parcel) -> None:
        with transaction.atomic(), transaction.atomic(using="other"):
            note(row)
            if row.priority == 0:
                with transaction.atomic():
                    hang()

    report = in_batches(handle, handler_timeout=SOON)()
    assert_run(report, processed=2, failed=1)
    assert sent() == worked() == [1, 2]
    for alias in ("default", "other"):
        assert not connections[alias].in_atomic_block
        assert connections[alias].savepoint_ids == []
        assert not connections[alias].needs_rollback


@pytest.mark.usefixtures("only_who_hangs")
def test_a_transaction_that_was_interrupted_as_it_began_is_not_taken_for_an_open_one() -> None:
    """Django notes an inner block before its first statement; the interrupt comes in between."""
    the.errands(2)

    def handle(row: Errand) -> None:
        if row.place == 0:
            other: Any = connections["other"]
            other.in_atomic_block = True
            other.savepoint_ids.append("half")
            hang()

    report = the.at_least_once(handle, handler_timeout=SOON)()
    assert_run(report, processed=1, failed=1)
    assert not connections["other"].in_atomic_block
    with transaction.atomic(using="other"):
        the.errands(1)
    assert Errand.objects.count() == 3


if POSTGRESQL:

    def is_asleep(session: int) -> bool:
        """Return whether the server executes the handler's statement."""
        with connections["default"].cursor() as cursor:
            cursor.execute(
                "SELECT count(*) FROM pg_stat_activity "
                "WHERE pid = %s AND state = 'active' AND query LIKE '%%pg_sleep%%'",
                [session],
            )
            found: tuple[int] = cursor.fetchone()
            return found == (1,)

    @the.all_deliveries
    def test_a_statement_at_which_the_handler_was_interrupted_ends_in_the_server(
        make: the.Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        the.errands(2)
        sessions: list[int] = []
        interrupt = time_limit._Watched.interrupt

        def when_it_sleeps(watched: time_limit._Watched) -> None:
            """Wait until the statement has begun, or there would be nothing to cancel."""
            is_due = watched.is_over or any(map(is_asleep, sessions))
            connections.close_all()  # this thread is that of the limit
            if is_due:
                interrupt(watched)
            else:
                watched.due = time.monotonic() + 0.05

        monkeypatch.setattr(time_limit._Watched, "interrupt", when_it_sleeps)

        def handle(row: Errand) -> None:
            if row.place == 0:
                with connections["other"].cursor() as cursor:
                    cursor.execute("SELECT pg_backend_pid()")
                    sessions.append(cursor.fetchone()[0])
                    # Longer than the wait below for its end.
                    cursor.execute(f"SELECT pg_sleep({10 * the.PATIENCE})")

        report = make(handle, handler_timeout=SOON)()
        assert_run(report, processed=1, failed=1)
        assert isinstance(report.failures[0].error, HandlerTimeout)
        until(lambda: not is_asleep(sessions[0]))
        assert connections["other"].connection is None


def test_each_call_of_process_batch_is_limited() -> None:
    the.errands(3)
    sizes: list[int] = []

    def handle(rows: list[Errand]) -> None:
        sizes.append(len(rows))
        if any(row.place == 1 for row in rows):
            hang()

    options = {"process_batch": handle, "batch_size": 3, "handler_timeout": SOON}
    report = the.at_least_once(the.ignore, **options)()
    assert_run(report, processed=2, failed=1)
    assert sizes == [3, 1, 1, 1]
    assert isinstance(report.failures[0].error, HandlerTimeout)


@contextmanager
def taken_over(number: int) -> Iterator[tuple[threading.Event, list[int]]]:
    """Let another worker take so many rows over, once a handler has begun.

    It is in a thread of its own from the start: a thread that is interrupted while it starts
    another one may leave it half started.
    """
    begun, by_others = threading.Event(), list[int]()
    other = the.at_least_once(lambda given: by_others.append(given.pk), lease=Lease(1))

    def work() -> None:
        the.wait(begun)
        end = time.monotonic() + LAPSES
        while len(by_others) < number and time.monotonic() < end:
            other()
            time.sleep(0.05)

    with the.meanwhile(work):
        yield begun, by_others


def stuck(by_others: list[int], number: int) -> None:
    """Wait until so many rows were taken over, as code in C would, which nothing interrupts."""
    end = time.monotonic() + LAPSES
    while time.monotonic() < end and len(by_others) < number:
        with suppress(HandlerCancelled):
            time.sleep(0.05)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_lease_is_not_renewed_for_a_handler_that_cannot_be_interrupted(
    monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    """Another worker takes the row over, and this one finds that it has lost it."""
    monkeypatch.setattr(calls, "GRACE", 0.1)
    [row] = the.errands(1)
    with taken_over(1) as (begun, by_others):

        def handle(given: Errand) -> None:
            begun.set()
            stuck(by_others, 1)

        async def handle_on_a_loop(given: Errand) -> None:
            handle(given)

        handler = handle_on_a_loop if is_async else handle
        report = the.at_least_once(handler, lease=Lease(1), handler_timeout=SOON)()
    assert by_others == [row.pk]
    assert_run(report, lease_lost=1)


def test_the_other_rows_of_a_stuck_handlers_claim_are_free_for_other_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They wait for the same thread, and their leases are not renewed either."""
    monkeypatch.setattr(calls, "GRACE", 0.1)
    rows = the.errands(3)
    called: list[int] = []
    with taken_over(3) as (begun, by_others):

        def handle(given: Errand) -> None:
            called.append(given.pk)
            # Only the first call is stuck: a later one would have its own row freed.
            if len(called) == 1:
                begun.set()
                stuck(by_others, 3)

        run = the.at_least_once(handle, lease=Lease(1), handler_timeout=SOON, batch_size=3)
        assert_run(run(), lease_lost=3)
    assert called == [rows[0].pk]
    assert sorted(by_others) == [row.pk for row in rows]


def test_a_later_holder_of_the_row_in_this_process_renews_its_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calls, "GRACE", 0.0)
    stuck, own = time_limit.TimeLimit(0.05, "stuck"), time_limit.TimeLimit(0.05, "own")
    call = calls.Call("stuck", [7], stuck)
    calls.begin(call)
    try:
        call.since -= 1
        assert calls.abandoned(stuck) == {7}
        assert calls.abandoned(own) == set()
    finally:
        calls.end(call)


def test_a_transaction_on_another_alias_is_not_lost() -> None:
    the.errands(1)
    run = the.transactional(hang_first, handler_timeout=SOON)
    with transaction.atomic(using="other"), pytest.raises(InsideTransaction, match="'other'"):
        run()
    assert_run(run(), failed=1)


def test_an_attempt_is_counted_when_the_server_has_released_the_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Forced: the row is still locked at the first try, by the session that was closed."""
    [row] = the.errands(1)
    tries: list[int] = []
    claim: Any = vars(recovery)["claim"]

    def late(*arguments: Any) -> Any:
        tries.append(len(tries))
        found = claim(*arguments)
        return Claimed([], {row.pk: Missed.ABSENT}) if len(tries) == 1 else found

    monkeypatch.setattr(recovery, "claim", late)
    run = the.transactional(lambda _: hang(), handler_timeout=SOON, retry=the.retry())
    assert_run(run(), failed=1, to_retry=1)
    assert Errand.objects.get().attempts == 1
    assert len(tries) >= 2


def test_no_thread_and_no_signal_handler_stays() -> None:
    the.errands(2)
    wakes = time_limit.WAKES
    assert wakes is not None
    before = signal.getsignal(wakes)
    seen: list[Any] = []
    run = the.transactional(
        lambda _: seen.append((signal.getsignal(wakes), the.our_threads())), handler_timeout=NEVER
    )
    assert_run(run(), processed=2)
    assert [callable(handler) for handler, _ in seen] == [True, True]
    assert [len(threads) for _, threads in seen] == [1, 1]
    assert signal.getsignal(wakes) == before
    assert the.our_threads() == []


def test_a_program_keeps_its_own_handler_of_the_signal() -> None:
    the.errands(2)
    wakes = time_limit.WAKES
    assert wakes is not None

    def own(*_: object) -> None:
        raise AssertionError("expected the interrupt before the first step of a signal handler")

    seen: list[Any] = []

    def handle(row: Errand) -> None:
        seen.append(signal.getsignal(wakes))
        hang_first(row)

    before = signal.signal(wakes, own)
    try:
        report = the.transactional(handle, handler_timeout=SOON)()
        assert signal.getsignal(wakes) is own
    finally:
        signal.signal(wakes, before)
    assert_run(report, processed=1, failed=1)
    assert seen == [own, own]


@pytest.mark.django_db(transaction=False)
def test_inside_a_test_case_the_session_with_the_tests_rows_is_kept() -> None:
    the.errands(2)
    assert connection.in_atomic_block

    def handle(row: Errand) -> None:
        if row.place == 0:
            connection.savepoint_ids.append("begun")
        hang_first(row)

    before = [*connection.savepoint_ids]
    report = the.transactional(handle, handler_timeout=SOON)()
    assert_run(report, processed=1, failed=1)
    assert connection.savepoint_ids == before
    assert Errand.objects.filter(done=True).count() == 1
