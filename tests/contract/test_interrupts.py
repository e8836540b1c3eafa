"""An interrupt between the claim's commit and the handler costs no row an attempt: I10."""

from __future__ import annotations

import asyncio
import gc
import inspect
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from types import CodeType, CoroutineType, FrameType
from typing import Any

import pytest
from django.db import connection, transaction

import dcl_processor
from dcl_processor.engine.calls import execute
from dcl_processor.engine.lane import Lane
from dcl_processor.engine.run import Run
from dcl_processor.engine.settlement import COMMIT
from dcl_processor.execution.event_loop import EventLoop
from dcl_processor.report.interrupts import wait_for_next
from dcl_processor.sql.isolation import ReadCommitted
from dcl_processor.sql.messages import in_one_message
from tests import seams
from tests.contract.support import errands as the
from tests.contract.support.batches import note, sent, worked
from tests.contract.support.clocks import HOUR, Clock
from tests.contract.support.messages import SENDS_SEVERAL
from tests.contract.support.parcels import in_batches, parcels
from tests.contract.support.reports import assert_run
from tests.models import Errand, Parcel
from tests.shares import points
from tests.waiting import until

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

#: What is called first when the claim has been committed, and what calls the handler: from there on
#: it is not known whether it has begun.
COMMITTED: CodeType = Lane.hold.__code__
BEGUN: CodeType = execute.__code__
START: CodeType = EventLoop.start.__code__
WAIT: CodeType = wait_for_next.__code__
BLOCK = (ReadCommitted.__enter__.__code__, ReadCommitted.__exit__.__code__)
#: What follows upon a row: another handler, or the report.
AFTERWARDS = (BEGUN, Run._conclude.__code__)
CLOSE: CodeType = EventLoop.close.__code__

PACKAGE = str(Path(dcl_processor.__file__).parent)

PROCESSORS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "claim and time": (the.at_most_once, {}),
    "claim alone": (the.at_most_once, {"claimed_at": None}),
    "flip alone": (the.at_most_once, {"claimed_at": None, "claim": None}),
    "lease": (the.at_least_once, {"retry": the.retry()}),
}


@contextmanager
def profiled(profile: Callable[[FrameType, str, Any], None]) -> Iterator[None]:
    """Call the function at each call and return of this thread."""
    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(before)


@contextmanager
def interrupted(at: int, say: Callable[[FrameType, str], bool | None]) -> Iterator[list[int]]:
    """Raise as Ctrl-C does, at the point after so many; yield its number, if there is one.

    ``say``: whether Python may look for signals there; ``None``: there are no more points.
    """
    points, reached = 0, list[int]()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal points
        is_point = say(frame, event)
        points += bool(is_point)
        if is_point is None or points > at:
            sys.setprofile(None)
        if points > at:
            reached.append(points)
            raise KeyboardInterrupt

    with profiled(profile):
        yield reached


def before_a_handler(claims: int) -> Callable[[FrameType, str], bool | None]:
    """Say of each call, after so many claims and before the next handler, that it is a point."""
    left = claims

    def say(frame: FrameType, event: str) -> bool | None:
        nonlocal left
        left -= event == "call" and frame.f_code is COMMITTED
        if event != "call" or left > 0:
            return False
        # CPython's own locks fail with other errors when they are interrupted.
        return None if frame.f_code is BEGUN else frame.f_code.co_filename != threading.__file__

    return say


@pytest.mark.parametrize("claims", [1, 2], ids=["first claim", "second claim"])
@pytest.mark.parametrize("kind", PROCESSORS)
def test_i10_an_interrupt_before_the_handler_leaves_its_row_as_it_was(
    kind: str, claims: int
) -> None:
    """At each point of the way there; the first claim has a transaction, others a statement."""
    make, options = PROCESSORS[kind]
    for at in count():
        Errand.objects.all().delete()
        rows = the.errands(2)
        handled: list[Any] = []
        with suppress(KeyboardInterrupt), interrupted(at, before_a_handler(claims)):
            make(lambda row: handled.append(row.pk), **options)()  # noqa: B023  # called here
        if len(handled) >= claims:
            assert at > 5
            return
        assert [the.state(row)["done"] for row in rows] == [row.pk in handled for row in rows]
        assert all(the.untouched(row) for row in rows if row.pk not in handled), at


def is_in_a_block(frame: FrameType | None) -> bool:
    """Say whether a transaction begins or ends there, which takes several steps of Django's.

    What is raised while an object is deleted is lost.
    """
    while frame is not None and frame.f_code not in BLOCK:
        frame = None if frame.f_code.co_name == "__del__" else frame.f_back
    return frame is not None


@pytest.mark.parametrize("kind", ["run", "mark_done"])
def test_i10_an_interrupt_in_a_block_is_raised_and_leaves_no_transaction_open(kind: str) -> None:
    """Django's own end of a block fails after one, which would hide it."""
    at_work = the.transactional(the.ignore) if kind == "run" else the.at_most_once(the.ignore)

    def act() -> None:
        if kind == "run":
            with connection.execute_wrapper(lambda execute, *statement: execute(*statement)):
                at_work()
        else:
            at_work.mark_done(Errand.objects.all(), force=True)

    def say(frame: FrameType, event: str) -> bool:
        # Only the rows of a run are rolled back outside the block, too, if it has not begun to end.
        is_too_early = kind == "mark_done" and event == "call" and frame.f_code in BLOCK
        return event in {"call", "c_return"} and not is_too_early and is_in_a_block(frame)

    for at in points(f"interrupts in a block of {kind}", 5):
        Errand.objects.all().delete()
        [row] = the.errands(1, claimed=kind != "run")
        was_raised = False
        with interrupted(at, say) as reached:
            try:
                act()
            except KeyboardInterrupt:
                was_raised = True
        assert was_raised == bool(reached), at
        assert not connection.in_atomic_block
        assert connection.get_autocommit()
        if not reached:
            assert at > 50
            return
        act()
        assert the.state(row)["done"]


def test_an_interrupt_in_the_commit_puts_no_claim_of_another_copy_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The claim was not committed, and without a time it looks like that of any copy."""
    [row] = the.errands(1)

    def commit() -> None:
        monkeypatch.undo()
        connection.connection.rollback()
        claimed = Errand.objects.filter(pk=row.pk, claimed=False)
        assert the.elsewhere(lambda: claimed.update(claimed=True)) == 1
        raise KeyboardInterrupt

    def send(cursor: Any, statements: Any) -> Any:
        if statements[-1] == COMMIT:
            commit()
        return in_one_message(cursor, statements)

    monkeypatch.setattr(connection, "_commit", commit)
    seams.replace(monkeypatch, seams.SEND_TOGETHER, send)
    with pytest.raises(KeyboardInterrupt):
        the.at_most_once(the.ignore, claimed_at=None, reset={"claimed": False})()
    assert the.state(row)["claimed"] is True
    assert the.state(row)["done"] is False


def is_of_the_package(frame: FrameType) -> bool:
    """Say whether the package called, or is called: each line of it that does something."""
    callers = (frame, frame.f_back)
    return any(caller and caller.f_code.co_filename.startswith(PACKAGE) for caller in callers)


@pytest.mark.parametrize("number", [2, 4], ids=["the last rows", "others"])
@pytest.mark.parametrize(
    # Elsewhere an interrupt in the COMMIT leaves open whether it took effect.
    "kind",
    [*(["transactional"] if SENDS_SEVERAL else []), "claim and time", "claim alone", "lease"],
)
def test_i10_an_interrupt_after_a_row_is_reported_as_it_left_the_rows(
    kind: str, number: int
) -> None:
    """What is written for one row may wait for the claim of the next one."""
    make, options = {"transactional": (the.transactional, {}), **PROCESSORS}[kind]
    handled: list[Any] = []

    def say(frame: FrameType, event: str) -> bool | None:
        # What is raised while an abandoned generator is closed is lost.
        code = frame.f_code
        is_lost = code.co_flags & inspect.CO_GENERATOR or code.co_name == "__del__"
        if event != "call" or len(handled) < 2 or is_lost:
            return False
        return None if frame.f_code in AFTERWARDS else is_of_the_package(frame)

    for at in points(f"after a row, {kind}", of=4):
        Errand.objects.all().delete()
        handled.clear()
        rows = the.errands(number)
        try:
            with interrupted(at, say):
                make(lambda row: handled.append(row.pk), **options)()
        except KeyboardInterrupt as error:
            report = error.report  # type: ignore[attr-defined]  # as documented
            done = [row.pk for row in rows if the.state(row)["done"]]
            assert (report.processed, report.failed, report.lease_lost) == (len(done), 0, 0), at
            assert done[:1] == handled[:1]
            assert connection.execute_wrappers == []
            assert all(the.untouched(row) for row in rows[3:])
            assert not the.our_threads()
        else:
            assert at > 50
            return


def end_unused_coroutines() -> None:
    """End the calls that an interrupt has left before they were sent to the loop."""
    for each in gc.get_objects():
        if type(each) is CoroutineType and each.cr_code is EventLoop._execute.__code__:
            each.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_i10_an_interrupt_before_the_thread_of_the_event_loop_starts_ends_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = the.errands(2)
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        if getattr(thread, "_target", None).__name__ == "_serve":  # type: ignore[union-attr]
            raise KeyboardInterrupt
        start(thread)

    async def handle(row: Errand) -> None:
        raise AssertionError("expected no call")

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        the.at_least_once(handle, retry=the.retry())(concurrency=2)
    end_unused_coroutines()
    assert all(the.state(row)["attempts"] == 0 for row in rows)


#: Where the outcome of an asynchronous handler is taken on its way to the settlement.
ON_THE_WAY = tuple(
    f"{PACKAGE}/{name}.py"
    for name in (
        "engine/lane",
        "engine/marked",
        "engine/settling",
        "execution/event_loop",
        "interrupts",
    )
)


def from_start_to_settlement() -> Callable[[FrameType, str], bool | None]:
    """Say of each call, and return from C, that it is a point, once a handler is started.

    CPython looks for signals when a call of a C function has returned, so that what the function
    returned is lost.
    """
    is_begun = False

    def say(frame: FrameType, event: str) -> bool | None:
        nonlocal is_begun
        code = frame.f_code
        is_begun = is_begun or code is START
        is_step = event in ("call", "c_return") and code.co_filename in ON_THE_WAY
        is_lost = bool(code.co_flags & inspect.CO_GENERATOR)
        return None if code is CLOSE else is_begun and is_step and not is_lost

    return say


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", ["claim and time", "claim alone", "lease"])
def test_i10_an_interrupt_loses_no_outcome_of_a_handler_on_an_event_loop(kind: str) -> None:
    """At each step from the first start to the last settlement: whose work is done, is done."""
    make, options = PROCESSORS[kind]
    handled: list[Any] = []

    async def handle(row: Errand) -> None:
        handled.append(row.pk)

    for at in points(f"outcome on its way, {kind}", of=8):
        Errand.objects.all().delete()
        handled.clear()
        rows = the.errands(2)
        try:
            with interrupted(at, from_start_to_settlement()):
                make(handle, batch_size=2, **options)(concurrency=2)
        except KeyboardInterrupt as error:
            report: Any = error.report  # type: ignore[attr-defined]  # as documented
            done = [row.pk for row in rows if the.state(row)["done"]]
            assert done == sorted(handled), at
            # What is settled, and not counted yet, is in no report.
            assert report.processed in {0, len(done)}, at
            assert (report.failed, report.lease_lost) == (0, 0), at
        else:
            assert at > 100
            return
        finally:
            end_unused_coroutines()


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.usefixtures("interrupt")
def test_i10_an_interrupt_that_ends_no_wait_ends_the_run(is_async: bool) -> None:
    """It came to another thread, or between Python's last look for it and the wait."""
    the.errands(1)
    main, over = threading.get_ident(), threading.Event()

    def press() -> None:
        def waits() -> bool:
            frame: FrameType | None = sys._current_frames()[main]
            is_in_wait = frame is not None and frame.f_code.co_filename == threading.__file__
            while is_in_wait and frame is not None and frame.f_code is not Run._drive.__code__:
                frame = frame.f_back
            return frame is not None and frame.f_code in (WAIT, Run._drive.__code__)

        until(waits, "the run to wait")
        over.wait(0.1)  # until it has left the interpreter
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    async def handle_on_a_loop(row: Errand) -> None:
        press()
        await asyncio.Event().wait()

    def handle(row: Errand) -> None:
        press()
        the.wait(over)

    try:
        with pytest.raises(KeyboardInterrupt):
            the.at_least_once(handle_on_a_loop if is_async else handle)(concurrency=2)
    finally:
        over.set()
    until(lambda: not the.our_threads(), "the threads to end")


# --- what ends a batch before its end, and leaves the rest of it as it was


def test_i10_a_stop_leaves_the_rows_that_have_not_started_as_they_were() -> None:
    parcels(6)
    stop = threading.Event()

    def handle(row: Parcel) -> None:
        note(row)
        if row.priority == 2:
            stop.set()

    report = in_batches(handle)(stop=stop)
    assert_run(report, processed=3, stopped="signal")
    assert sent() == worked() == [0, 1, 2]


def test_a_limit_is_kept_within_a_batch() -> None:
    parcels(10)
    calls: list[int] = []
    report = in_batches(lambda row: calls.append(row.priority), batch_size=4)(limit=6)
    assert_run(report, processed=6, stopped="limit")
    assert calls == sent() == list(range(6))


def test_a_timeout_leaves_the_rest_of_the_batch_as_it_was(clock: Clock) -> None:
    parcels(4)

    def handle(row: Parcel) -> None:
        if row.priority == 1:
            clock.passed += HOUR

    report = in_batches(handle)(timeout=HOUR)
    assert_run(report, processed=2, stopped="timeout")
    assert sent() == [0, 1]


def test_i10_an_interrupt_rolls_the_whole_batch_back_and_ends_the_run() -> None:
    parcels(4)
    ran: list[int] = []

    def handle(row: Parcel) -> None:
        note(row)
        transaction.on_commit(lambda: ran.append(row.priority))
        if row.priority == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        in_batches(handle)()
    assert (sent(), worked(), ran) == ([], [], [])
    assert not connection.in_atomic_block
    assert "_cursor" not in vars(connection)
    assert connection.execute_wrappers == []
    assert_run(in_batches(note)(), processed=4)


def test_so_many_failures_in_a_row_end_a_batch_before_its_end() -> None:
    parcels(20)
    calls: list[int] = []

    def handle(row: Parcel) -> None:
        calls.append(row.priority)
        if row.priority > 4:
            raise ConnectionError

    report = in_batches(handle, max_consecutive_failures=3, batch_size=10)()
    assert_run(report, processed=5, failed=3, stopped="failures")
    assert calls == list(range(8))
    assert sent() == [0, 1, 2, 3, 4]


def test_failures_in_a_row_are_counted_across_batches_and_a_success_ends_the_count() -> None:
    parcels(20)
    good = {0, 3, 6}

    def handle(row: Parcel) -> None:
        if row.priority not in good:
            raise ConnectionError

    report = in_batches(handle, max_consecutive_failures=4, batch_size=2)()
    assert_run(report, processed=3, failed=8, stopped="failures")
