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

from dcl_processor.engine import calls
from dcl_processor.engine.calls import Call
from dcl_processor.execution.event_loop import EventLoop
from dcl_processor.execution.time_limit import TimeLimit
from dcl_processor.processes import monitor as judging
from dcl_processor.processes.graceful_stop import Stop
from dcl_processor.processes.monitor import WARNED_AFTER, Life, Monitor, OwnTime
from dcl_processor.processes.news import LONGEST, MOST_ROWS, AtWork, Beat, Inbox, Outbox
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


def test_a_long_call_is_warned_of_once(
    monitor: Monitor, call: Call, caplog: pytest.LogCaptureFixture
) -> None:
    monitor.look(call.since + WARNED_AFTER - 1)
    assert warnings(caplog) == []
    for minute in range(5, 46):
        monitor.look(call.since + minute * MINUTE + 0.001)
    (line,) = warnings(caplog)
    assert f"shop.send: process {os.getpid()}: row 17 is still in its handler" in line
    assert "after 5 min (since " in line


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
        assert beat.call.keys == (how,)


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
        look_on(monitor, time.monotonic() + 3 / 4 * MINUTE, time.monotonic() + MINUTE - 1)
        assert [beat.call.keys for beat in beats if beat.call] == [("blocks",)] * len(beats)
        assert not any(beat.is_overdue for beat in beats)


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


# --- what ends with its process: a call that does not end


@pytest.fixture
def killed() -> list[bool]:
    return []


@pytest.fixture
def killing(beats: list[Beat], killed: list[bool]) -> Monitor:
    return Monitor(beats.append, kill=lambda: killed.append(True))


def look_on(monitor: Monitor, first: float, last: float) -> None:
    """Look in each second from the first to the last."""
    for second in range(int(last - first) + 1):
        monitor.look(first + second)


def test_a_late_call_has_its_grace_before_its_process_is_killed(
    killing: Monitor, beats: list[Beat], killed: list[bool], limited: Call
) -> None:
    look_on(killing, limited.since + 1, limited.since + MINUTE + 11)
    assert killed == []
    assert not any(beat.is_overdue for beat in beats)
    killing.look(limited.since + MINUTE + 12)
    assert killed == [True]
    assert beats[-1].is_overdue


def test_a_call_that_follows_a_late_one_has_its_own_grace(
    killing: Monitor, killed: list[bool], limited: Call
) -> None:
    """As of a process that was stopped in between."""
    look_on(killing, limited.since + MINUTE + 1, limited.since + MINUTE + 9)
    calls.end(limited)
    following = begun((1,), MINUTE)
    try:
        look_on(killing, following.since + MINUTE + 1, following.since + MINUTE + 11)
        assert killed == []
        killing.look(following.since + MINUTE + 12)
        assert killed == [True]
    finally:
        calls.end(following)


def test_a_pause_of_the_machine_does_not_shorten_the_grace(
    killing: Monitor, killed: list[bool], limited: Call
) -> None:
    killing.look(limited.since + MINUTE + 1)
    killing.look(limited.since + 60 * MINUTE)
    assert killed == []


def test_a_call_that_has_ended_while_its_beat_waited_is_not_killed(
    killed: list[bool], limited: Call
) -> None:
    """Its parent was stopped, and the pipe was full."""

    def send(beat: Beat) -> None:
        if beat.is_overdue:
            calls.end(limited)

    monitor = Monitor(send, kill=lambda: killed.append(True))
    look_on(monitor, limited.since + MINUTE + 1, limited.since + MINUTE + 12)
    assert (killed, calls.under_way()) == ([], [])


# --- the parent's judgement


def test_a_worker_that_does_not_move_is_killed_if_each_processor_has_a_limit() -> None:
    judged, unlimited = Life(MINUTE, 0), Life(None, 0)
    for each in (judged, unlimited):
        each.hear(1, Beat(AtWork("shop.send", ("17",), 1, 0.0, MINUTE)))
        assert not each.is_silent(11)
        assert each.is_silent(12)
        assert each.fault(70) is None
    assert "it has not moved for 71 s, last seen at row 17" in (judged.fault(72) or "")
    assert unlimited.fault(10_000) is None


def test_a_short_limit_does_not_kill_what_is_only_slow() -> None:
    judged = Life(0.1, 0)
    judged.hear(1, Beat(None))
    assert judged.fault(1 + judging.KILLED_SILENT) is None
    assert judged.fault(1.1 + judging.KILLED_SILENT) is not None
    loading = Life(0.1, 0)
    assert loading.fault(judging.LOADED_WITHIN) is None
    assert not loading.is_silent(judging.LOADED_WITHIN)
    assert loading.fault(judging.LOADED_WITHIN + 1) is not None


def test_time_in_which_a_process_did_not_run_does_not_count() -> None:
    own, now = OwnTime(), time.monotonic()
    for step, seconds in ((0.2, 0.2), (1.0, 1.2), (3_600.0, 3.2)):
        now += step
        assert own.pass_(now) == pytest.approx(seconds, abs=0.1)
