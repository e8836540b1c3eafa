"""What the monitor and the supervisor make of calls that take long, by a clock of the tests."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from typing import Any, cast

import pytest

from dcl_processor.execution import calls
from dcl_processor.execution.calls import Call
from dcl_processor.execution.event_loop import EventLoop
from dcl_processor.execution.time_limit import TimeLimit
from dcl_processor.processes import monitor as judging
from dcl_processor.processes.graceful_stop import Stop
from dcl_processor.processes.messages import Inbox, Outbox
from dcl_processor.processes.monitor import FIRST_WARNING, Lateness, Monitor, OwnTime
from dcl_processor.processes.news import LONGEST, MOST_ROWS, AtWork, Beat
from tests.waiting import until, wait

MINUTE = 60.0


@pytest.fixture
def beats() -> list[Beat]:
    return []


@pytest.fixture
def monitor(beats: list[Beat]) -> Monitor:
    return Monitor(beats.append)


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


def test_a_beat_has_the_oldest_call_that_is_late(
    monitor: Monitor, beats: list[Beat], call: Call, limited: Call
) -> None:
    monitor.look(limited.since + 1)
    monitor.look(limited.since + MINUTE + 1)
    calls.end(limited)
    monitor.look(limited.since + MINUTE + 2)
    first, second, third = beats
    assert (first.call, second.call) == (AtWork.of(call), AtWork.of(limited))
    assert third.call == AtWork.of(call)


def test_the_thread_survives_an_error(call: Call) -> None:
    """Without beats its process would be killed."""
    sent: list[Beat] = []

    def send(beat: Beat) -> None:
        sent.append(beat)
        raise ValueError("no")

    with Monitor(send, pace=0.01):
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
        with Monitor(sent.append, pace=0.01):
            until(lambda: len(sent) >= 5, "five beats")
    finally:
        go.set()
        to.removeHandler(slow)


class Odd:
    def __str__(self) -> str:
        raise ValueError("no text")


def test_a_beat_has_the_first_keys_of_a_call() -> None:
    """However long the keys are, and however many there are."""
    work = AtWork.of(Call("p", [Odd(), *["7" * 1_000] * 5_000], None))
    assert work.rows == ["?", *["7" * LONGEST] * (MOST_ROWS - 1)]
    assert work.named.endswith(" and 4996 more")
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
    how: str, monitor: Monitor, beats: list[Beat]
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


# --- the pipe


@pytest.fixture
def ends() -> Iterator[tuple[Outbox, Inbox]]:
    own, parents = Pipe()
    with own, parents:
        yield Outbox(own, Stop()), Inbox(parents)


def test_the_parent_does_not_wait_for_the_rest_of_a_message(ends: tuple[Outbox, Inbox]) -> None:
    results, inbox = ends
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
    return lateness.fault(now, now if at is None else at)


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
