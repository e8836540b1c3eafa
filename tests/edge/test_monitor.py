"""What the monitor and the supervisor make of calls that take long, by a clock of the tests."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, cast

import pytest

from dcl_processor.execution import calls
from dcl_processor.execution.calls import Call
from dcl_processor.execution.event_loop import EventLoop
from dcl_processor.execution.in_flight import Death
from dcl_processor.execution.time_limit import TimeLimit
from dcl_processor.processes import monitor as judging
from dcl_processor.processes.beats import MOST_ROWS, AtWork, Beat
from dcl_processor.processes.graceful_stop import Stop
from dcl_processor.processes.monitor import FIRST_WARNING, Lateness, Monitor, OwnTime
from dcl_processor.processes.results import Inbox, Results
from tests.waiting import join, until, wait

MINUTE = 60.0


@pytest.fixture
def beats() -> list[Beat]:
    return []


@pytest.fixture
def monitor(beats: list[Beat]) -> Monitor:
    return Monitor(beats.append, Stop())


def begun(keys: Sequence[int], seconds: float | None = None) -> Call:
    """Begin a call that may take so many seconds."""
    limits = None if seconds is None else TimeLimit(seconds, "shop.send")
    call = Call("shop.send", keys, limits)
    calls.begin(call)
    return call


@pytest.fixture
def call() -> Iterator[Call]:
    """Begin a call without a limit, and end it."""
    call = begun((17,))
    yield call
    calls.end(call)


@pytest.fixture
def limited() -> Iterator[Call]:
    """Begin a call that may take a minute, and end it."""
    call = begun(range(100), MINUTE)
    yield call
    calls.end(call)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]


def test_a_long_call_is_warned_of_each_time_it_has_taken_twice_as_long(
    monitor: Monitor, call: Call, caplog: pytest.LogCaptureFixture
) -> None:
    warned: list[int] = []
    for minute in range(46):
        monitor.look(call.since + minute * MINUTE + 0.001)
        if warnings(caplog):
            warned.append(minute)
            (line,) = warnings(caplog)
            assert f"shop.send: process {os.getpid()}: row 17 is still in its handler" in line
            assert f"after {minute} min (since " in line
            caplog.clear()
    assert warned == [5, 10, 20, 40]
    assert FIRST_WARNING == 5 * MINUTE


def test_a_call_that_was_not_looked_at_for_long_is_warned_of_once(
    monitor: Monitor, call: Call, caplog: pytest.LogCaptureFixture
) -> None:
    monitor.look(call.since + 45 * MINUTE)
    monitor.look(call.since + 46 * MINUTE)
    assert len(warnings(caplog)) == 1


def test_a_call_that_goes_on_after_its_limit_is_warned_of_once(
    monitor: Monitor, limited: Call, caplog: pytest.LogCaptureFixture
) -> None:
    """Not at its limit: a handler that was interrupted needs some time to end."""
    for second in (59, 61, 64):
        monitor.look(limited.since + second)
    assert warnings(caplog) == []
    for second in (66, 68, 80):
        monitor.look(limited.since + second)
    (line,) = warnings(caplog)
    assert "rows 0, 1, 2, 3, 4 and 95 more goes on although its handler_timeout of 60 s is" in line


def test_a_beat_has_the_oldest_call_that_is_late(
    monitor: Monitor, beats: list[Beat], call: Call, limited: Call
) -> None:
    monitor.look(limited.since + 1)
    monitor.look(limited.since + MINUTE + 1)
    monitor._stop.set()
    calls.end(limited)
    monitor.look(limited.since + MINUTE + 2)
    first, second, third = beats
    assert (first.call, second.call) == (AtWork.of(call), AtWork.of(limited))
    assert (third.call, third.is_stopping) == (AtWork.of(call), True)


def test_the_thread_survives_an_error(call: Call) -> None:
    """Without beats its process would be killed."""
    sent: list[Beat] = []

    def send(beat: Beat) -> None:
        sent.append(beat)
        raise ValueError("no")

    with Monitor(send, Stop(), pace=0.01):
        until(lambda: len(sent) >= 3, "three beats")


def test_a_slow_log_handler_does_not_hold_up_the_beats(call: Call) -> None:
    sent: list[Beat] = []
    go = threading.Event()

    class Slow(logging.Handler):
        def emit(self, _: logging.LogRecord) -> None:
            go.wait()

    slow, to = Slow(), logging.getLogger("dcl_processor.operations")
    to.addHandler(slow)
    call.since -= 6 * MINUTE
    try:
        with Monitor(sent.append, Stop(), pace=0.01):
            until(lambda: len(sent) >= 5, "five beats")
    finally:
        go.set()
        to.removeHandler(slow)


class Odd:
    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize("key", ["\N{GRINNING FACE}" * 1_000, "7"])
def test_a_beat_is_short_enough_for_a_pipe_to_take_it_as_one(key: str) -> None:
    """However long the keys are, and however many there are."""
    call = Call("é" * 1_000, [Odd(), *[key] * 5_000], TimeLimit(1.0, "shop.send"))
    work = AtWork.of(call)
    assert work.rows[0] == "?"
    assert (len(work.keys), work.number) == (MOST_ROWS, 5_001)
    assert len(pickle.dumps(Beat(1.0, work, is_stopping=True))) < 4_000
    assert AtWork.of(Call("p", ["a\x1b[2J\nb"], None)).named == "row a\\x1b[2J b"


# --- handlers on one event loop


class Loop:
    """Runs asynchronous handlers of keys on one event loop, as a run does."""

    _handles_batches = False

    def __init__(self, seconds: float) -> None:
        self.loop = EventLoop("shop.send", 3, seconds)
        self.blocked = threading.Event()
        self.go = threading.Event()
        self.was_cancelled = threading.Event()

    def start(self, pk: str) -> None:
        self.loop.start(cast("Any", self), pk, pk, ())

    async def process(self, pk: str) -> None:
        match pk:
            case "waits":
                await asyncio.sleep(600)
            case "blocks":
                self.block()
            case "blocks in a task":
                await asyncio.gather(self.block_soon(), asyncio.sleep(600))
            case "ignores its end":
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(600)
                self.was_cancelled.set()
                await asyncio.sleep(600)

    async def block_soon(self) -> None:
        self.block()

    def block(self) -> None:
        self.blocked.set()
        self.go.wait()


@contextmanager
def looping(seconds: float) -> Iterator[Loop]:
    on = Loop(seconds)
    try:
        yield on
    finally:
        on.go.set()
        on.loop.give_up()
        on.loop.close()


#: Before 3.12 a task does not show its context, and the oldest call is blamed as before.
BLOCKING = ["blocks", "blocks in a task"] if sys.version_info >= (3, 12) else ["blocks"]


@pytest.mark.parametrize("how", BLOCKING)
def test_the_handler_that_blocks_the_event_loop_is_blamed(
    how: str, monitor: Monitor, beats: list[Beat], caplog: pytest.LogCaptureFixture
) -> None:
    """The others, which began earlier, cannot be cancelled meanwhile."""
    with looping(MINUTE) as on:
        for pk in ("waits", how):
            on.start(pk)
        wait(on.blocked)
        monitor.look(time.monotonic() + 2 * MINUTE)
        (beat,) = beats
        assert beat.call is not None
        assert (beat.call.keys, beat.call.is_late(beat.at)) == ((how,), True)
        (line,) = warnings(caplog)
        assert f"row {how} goes on although" in line


def test_a_handler_that_blocks_the_event_loop_has_its_own_limit(
    monitor: Monitor, beats: list[Beat]
) -> None:
    """Those that it holds up are late earlier, and are not to blame."""
    with looping(MINUTE) as on:
        on.start("waits")
        found = until(calls.under_way, "the handler")
        found[0].since -= MINUTE / 2
        on.start("blocks")
        wait(on.blocked)
        monitor.look(time.monotonic() + 3 / 4 * MINUTE)
        (beat,) = beats
        assert beat.call is not None
        assert (beat.call.keys, beat.call.is_late(beat.at)) == (("blocks",), False)


def test_a_handler_that_was_cancelled_and_goes_on_is_blamed_itself(
    monitor: Monitor, beats: list[Beat]
) -> None:
    with looping(0.05) as on:
        on.start("ignores its end")
        wait(on.was_cancelled)
        on.start("blocks")
        wait(on.blocked)
        monitor.look(time.monotonic() + MINUTE)
        (beat,) = beats
        assert beat.call is not None
        assert beat.call.keys == ("ignores its end",)


# --- the pipes


@pytest.fixture
def ends() -> Iterator[tuple[Results, Inbox, Inbox]]:
    """Return both ends of the pipe for messages, and the parent's end of that for beats."""
    (reading, writing), (beats, own) = Pipe(duplex=False), Pipe(duplex=False)
    with reading, writing, beats, own:
        yield Results(writing, own, Stop()), Inbox(reading), Inbox(beats)


def test_a_message_that_waits_for_the_parent_does_not_hold_up_the_beats(
    ends: tuple[Results, Inbox, Inbox],
) -> None:
    """Nor do beats that no process reads hold up the worker."""
    results, inbox, beats = ends
    sending = threading.Thread(target=results.send, args=("shop.send", "x" * 1_000_000))
    sending.start()
    try:
        for second in range(3_000):
            results.beat(beat(second))
        assert beats.take()[:3] == [beat(second) for second in range(3)]
        assert sending.is_alive()
    finally:
        received: list[object] = []
        while not received:
            received = [*inbox.take()]
        join(sending)
    assert received == [("shop.send", "x" * 1_000_000)]
    assert not results._stop.is_set()


def test_a_beat_of_which_the_pipe_takes_a_part_comes_as_a_whole(
    ends: tuple[Results, Inbox, Inbox], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where PIPE_BUF is 512 bytes; a beat that the pipe has no room for is left out."""
    results, _, beats = ends
    write, room = os.write, [512]

    def write_a_part(file: int, data: bytes) -> int:
        if room[0] == 0:
            raise BlockingIOError
        written = write(file, data[: room[0]])
        room[0] -= written
        return written

    monkeypatch.setattr("dcl_processor.processes.results.os.write", write_a_part)
    keys = tuple(str(number) * 100 for number in range(MOST_ROWS))
    first, left_out, *others = (Beat(n, AtWork("p", keys, 9, 0.0, None)) for n in range(4))
    assert len(pickle.dumps(first)) > 512
    results.beat(first)
    results.beat(left_out)
    assert beats.take() == []
    room[0] = 10_000
    results.beat(others[0])
    assert beats.take() == [first, others[0]]
    results.beat(others[1])
    assert beats.take() == [others[1]]
    assert not results._stop.is_set()


def test_the_parent_does_not_wait_for_the_rest_of_a_message(
    ends: tuple[Results, Inbox, Inbox],
) -> None:
    results, inbox, _ = ends
    results.send("shop.send", "processed")
    results.send("shop.send", "failed")
    whole = os.read(inbox._pipe.fileno(), 1_000)
    assert inbox.take() == []
    os.write(results._pipe.fileno(), whole[:-5])
    assert inbox.take() == [("shop.send", "processed")]
    assert inbox.take() == []
    os.write(results._pipe.fileno(), whole[-5:-1])
    assert inbox.take() == []
    os.write(results._pipe.fileno(), whole[-1:])
    assert inbox.take() == [("shop.send", "failed")]
    results._pipe.close()
    with pytest.raises(EOFError):
        inbox.take()


# --- the parent's judgement


def beat(at: float, *, since: float = 0.0, limit: float | None = MINUTE) -> Beat:
    return Beat(at, AtWork("shop.send", ("17",), 1, since, limit))


def fault(lateness: Lateness, now: float, at: float | None = None) -> str | None:
    """Judge; ``at``: the monotonic clock, if it differs from the parent's own."""
    return lateness.fault(now, os.getpid(), now if at is None else at)


def test_a_late_call_has_its_grace_before_its_worker_is_killed() -> None:
    judged = Lateness(MINUTE, 0)
    for second in range(1, 70):
        judged.hear(second, beat(second))
        assert fault(judged, second) is None
        assert judged.is_alive(second)
    judged.hear(72, beat(72))
    assert "row 17 did not leave its handler within 10 s" in (fault(judged, 72) or "")
    assert not judged.is_alive(72)


def test_a_call_that_follows_a_late_one_has_its_own_grace() -> None:
    """Both were late when their beats came, as of a worker that was stopped in between."""
    judged = Lateness(MINUTE, 0)
    judged.hear(62, beat(62))
    judged.hear(70, beat(170, since=100))
    judged.hear(75, beat(175, since=100))
    assert fault(judged, 75, 175) is None
    judged.hear(81, beat(181, since=100))
    assert fault(judged, 81, 181) is not None


def test_no_worker_is_killed_for_what_an_old_beat_says() -> None:
    """The row may have ended since: later beats are on their way, or could not be sent."""
    judged = Lateness(MINUTE, 0)
    for second in range(61, 73):
        judged.hear(second, beat(second))
    assert fault(judged, 72 + judging.FRESH) is not None
    assert fault(judged, 72.1 + judging.FRESH) is None
    # Nor for one that has come late: the supervisor was stopped while it was in the pipe.
    judged.hear(80, beat(73))
    assert fault(judged, 80) is None
    judged.hear(81, beat(81))
    assert fault(judged, 81) is not None


def test_beats_that_have_come_late_do_not_shorten_the_grace() -> None:
    """The first one came at once, and the second one was made just before the grace was over."""
    judged = Lateness(MINUTE, 0)
    judged.hear(60.5, beat(60.5))
    judged.hear(71, beat(69.5))
    assert fault(judged, 71) is None


def test_a_worker_that_does_not_move_is_killed_if_each_processor_has_a_limit() -> None:
    judged, unlimited = Lateness(MINUTE, 0), Lateness(None, 0)
    for each in (judged, unlimited):
        each.hear(1, beat(1))
        assert each.is_alive(11)
        assert not each.is_alive(12)
        assert fault(each, 70) is None
    assert "it has not moved for 71 s" in (fault(judged, 72) or "")
    assert fault(unlimited, 10_000) is None


@pytest.mark.parametrize(
    ("row", "began", "is_faulty"),
    [("17", 0.0, True), ("18", 0.0, False), ("17", 65.0, False), (None, 0.0, False)],
)
def test_a_worker_that_stops_moving_in_a_late_call_is_killed_beside_processors_without_a_limit(
    monkeypatch: pytest.MonkeyPatch, row: str | None, began: float, is_faulty: bool
) -> None:
    """Not if by its notes it has left the row: a processor without a limit may take its time."""
    since = time.monotonic()
    note = Death(Path(), 1, time.time() + began, 1, ("16", str(row)))
    monkeypatch.setattr(judging, "rows_of", lambda _: [note] if row else [])
    judged = Lateness(None, 0)
    judged.hear(62, beat(since + 62, since=since))
    assert fault(judged, 132, since + 132) is None
    why = fault(judged, 133, since + 133)
    assert (why is not None) is is_faulty
    if why is not None:
        assert "it has not moved for 71 s, last at rows 16, 17 since" in why


def test_a_worker_that_stops_moving_before_its_limit_is_left_beside_processors_without_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it had begun may have ended since."""
    since = time.monotonic()
    note = Death(Path(), 1, time.time(), 1, ("17",))
    monkeypatch.setattr(judging, "rows_of", lambda _: [note])
    judged = Lateness(None, 0)
    judged.hear(1, beat(since + 1, since=since))
    assert fault(judged, 10_000, since + 10_000) is None


def test_a_short_limit_does_not_kill_what_is_only_slow() -> None:
    judged = Lateness(0.1, 0)
    judged.hear(1, Beat(1, None))
    assert fault(judged, 1 + judging.KILLED_SILENT) is None
    assert fault(judged, 1.1 + judging.KILLED_SILENT) is not None
    loading = Lateness(0.1, 0)
    assert fault(loading, judging.LOADED_WITHIN) is None
    assert loading.is_alive(judging.LOADED_WITHIN)
    assert fault(loading, judging.LOADED_WITHIN + 1) is not None


def test_time_in_which_the_parent_did_not_run_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr("dcl_processor.processes.monitor.time.monotonic", lambda: now)
    own = OwnTime()
    for step, seconds in ((0.2, 0.2), (1.0, 1.2), (3_600.0, 3.2)):
        now += step
        assert own.pass_() == pytest.approx(seconds)
