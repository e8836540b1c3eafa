"""The ledger's thread, whose database does not answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import pytest
from django.test import override_settings

import dcl_processor.ledger as api
from dcl_processor import Breaker
from dcl_processor.ledger import desk as module
from dcl_processor.ledger import ledger as process
from dcl_processor.ledger import orders
from dcl_processor.ledger.desk import (
    DEAD_AFTER,
    FIRST_PAUSE,
    MOST_REPLACED,
    PATIENCE,
    POLL,
    Desk,
    UnreachableError,
    _Line,
)
from dcl_processor.ledger.ledger import Ledger
from dcl_processor.ledger.models import Control
from dcl_processor.ledger.recording import Work
from dcl_processor.ledger.tables import alias
from tests.contract.support import errands as the
from tests.contract.support.reports import assert_run
from tests.crash.proxy import cut
from tests.models import Errand
from tests.waiting import until

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


NAME = "shop.silent"


def processor(handler: Any, **options: Any) -> Any:
    return the.transactional(handler, name=NAME, **options)


def fail(row: Errand) -> None:
    raise OSError("no route")


@pytest.fixture
def answer() -> Iterator[threading.Event]:
    """Let the database answer, at the latest at the end of the test."""
    event = threading.Event()
    yield event
    event.set()


def test_a_question_that_was_given_up_is_not_put_later(answer: threading.Event) -> None:
    """It would take a token, or a try, that no run knows of."""
    asked: list[int] = []
    began = threading.Event()

    def tick() -> bool:
        began.set()
        the.wait(answer)
        return False

    desk = Desk(tick, patience=the.PATIENCE)
    desk.call(lambda: None)
    the.wait(began)
    desk._patience = 0.1
    with pytest.raises(UnreachableError):
        desk.call(lambda: asked.append(0))
    desk._patience = the.PATIENCE
    answer.set()
    desk.close()
    assert asked == []


def test_a_read_that_succeeds_ends_the_pause() -> None:
    read = threading.Event()

    def tick() -> bool:
        read.set()
        return True

    desk = Desk(tick)
    desk._pause_longer()
    desk._post(lambda: None)
    the.wait(read)
    assert ask_within_bounds(desk) == "answered"
    desk.close()


def ask_within_bounds(desk: Desk) -> str:
    for _ in range(100):
        try:
            return str(desk.call(lambda: "answered"))
        except UnreachableError:
            threading.Event().wait(0.05)
    return "never"


# --- a thread whose connection is dead


class Clock:
    """The desk's clock, which the test moves."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    held = Clock()
    monkeypatch.setattr(module, "time", held)
    return held


DEAD = PATIENCE + DEAD_AFTER


class Stuck:
    """A desk whose ticks wait for an answer, each for its own."""

    def __init__(self) -> None:
        self.answers: list[threading.Event] = []
        self.ticks = 0
        self.is_stuck = True
        self.fails = False
        self.began: SimpleQueue[None] = SimpleQueue()
        self.desk = Desk(self.tick)

    def tick(self) -> bool:
        self.ticks += 1
        answer = threading.Event()
        if self.is_stuck:
            self.answers.append(answer)
        else:
            answer.set()
        self.began.put(None)
        answer.wait()  # let_go() sets it, at the latest
        if self.fails:
            raise OSError("no route")
        return True

    def begin(self) -> _Line:
        """Let the thread be stuck."""
        self.desk._post(lambda: None)
        return self.line_at_work()

    def line_at_work(self) -> _Line:
        self.began.get(timeout=the.PATIENCE)
        line = self.desk._line
        assert line is not None
        return line

    def let_go(self) -> None:
        self.is_stuck = False
        for answer in self.answers:
            answer.set()


@pytest.fixture
def stuck(clock: Clock) -> Iterator[Stuck]:
    found = Stuck()
    yield found
    found.let_go()
    found.desk.close()


def test_a_thread_that_is_stuck_in_a_tick_is_replaced(stuck: Stuck, clock: Clock) -> None:
    """Forced by the clock; before, no order was read any more, and no record written."""
    line = stuck.begin()
    clock.now += DEAD - 0.1
    stuck.desk.relieve()
    assert stuck.desk._line is line
    clock.now += 0.1
    stuck.is_stuck = False
    stuck.desk.relieve()
    assert stuck.line_at_work() is not line
    assert stuck.desk.call(lambda: "answered") == "answered"


def test_a_thread_that_is_stuck_in_a_question_is_replaced_and_does_not_tick_again(
    clock: Clock, answer: threading.Event
) -> None:
    asked, ticked = list[int](), list[int]()

    def tick() -> bool:
        ticked.append(threading.get_ident())
        return False

    def question() -> None:
        asked.append(threading.get_ident())
        the.wait(answer)

    desk = Desk(tick, patience=0.1)
    with pytest.raises(UnreachableError, match="no answer within"):
        desk.call(question)
    old = desk._line
    assert old is not None
    clock.now += DEAD
    desk.relieve()
    desk._patience = the.PATIENCE
    assert desk.call(lambda: "answered") == "answered"
    answer.set()
    old.join(the.PATIENCE)
    desk.close()
    assert ticked != []
    assert not {*asked} & {*ticked}


def test_a_thread_that_waits_for_questions_is_not_replaced(clock: Clock) -> None:
    desk = Desk(lambda: True)
    desk.call(lambda: None)
    line = desk._line
    assert line is not None
    until(lambda: line.busy_since is None, "the thread to wait")
    clock.now += 3600
    desk.call(lambda: None)
    until(lambda: line.busy_since is None, "the thread to wait")
    desk.relieve()
    assert desk._line is line
    desk.close()


def test_a_thread_that_has_answers_is_not_replaced(clock: Clock) -> None:
    """To delete old records takes many statements, and may take long."""
    desk = Desk(lambda: False)

    def take_long() -> bool:
        line = desk._line
        for _ in range(3):
            clock.now += DEAD - 1
            Control.objects.using(alias()).count()
            desk.relieve()
        return desk._line is line

    assert desk.call(take_long)
    desk.close()


def test_two_threads_are_replaced_at_most(stuck: Stuck, clock: Clock) -> None:
    """Each of them may have a connection, and the server may be away for long."""
    lines = [stuck.begin()]
    for _ in range(MOST_REPLACED):
        clock.now += DEAD
        stuck.desk.relieve()
        lines.append(stuck.line_at_work())
        stuck.desk.relieve()  # too soon
        assert stuck.desk._line is lines[-1]
    clock.now += 3600
    stuck.desk.relieve()
    assert stuck.desk._line is lines[-1]
    stuck.answers[0].set()
    lines[0].join(the.PATIENCE)
    stuck.desk.relieve()
    assert stuck.line_at_work() not in lines
    assert len({id(line) for line in lines}) == 1 + MOST_REPLACED


def test_a_thread_that_was_replaced_ends_and_takes_no_question(stuck: Stuck, clock: Clock) -> None:
    old = stuck.begin()
    clock.now += DEAD
    stuck.desk.relieve()
    new = stuck.line_at_work()
    by: list[str] = []
    job = stuck.desk._post(lambda: by.append("the new thread"))
    stuck.answers[0].set()
    old.join(the.PATIENCE)
    assert (by, stuck.ticks) == ([], 2)
    assert stuck.desk._line is new
    stuck.let_go()
    job.result(the.PATIENCE)
    assert by == ["the new thread"]


def test_a_thread_that_was_replaced_sends_no_further_statement(
    clock: Clock, answer: threading.Event
) -> None:
    began, sent = threading.Event(), []

    def late() -> None:
        began.set()
        the.wait(answer)
        sent.append(Control.objects.using(alias()).count())

    desk = Desk(lambda: False)
    job = desk._post(late)
    the.wait(began)
    clock.now += DEAD
    desk.relieve()
    answer.set()
    assert isinstance(job.exception(the.PATIENCE), UnreachableError)
    assert sent == []
    desk.close()


@pytest.mark.parametrize("fails", [True, False])
def test_what_comes_late_says_nothing_of_the_new_thread(
    stuck: Stuck, clock: Clock, caplog: pytest.LogCaptureFixture, fails: bool
) -> None:
    """Neither that it has an answer, nor that it has none."""
    old = stuck.begin()
    clock.now += DEAD
    stuck.desk.relieve()
    stuck.line_at_work()
    stuck.desk._pause_longer()
    stuck.fails = fails
    stuck.answers[0].set()
    old.join(the.PATIENCE)
    assert (stuck.desk._pause, caplog.text) == (FIRST_PAUSE, "")


def test_an_end_does_not_wait_for_a_thread_that_is_stuck(answer: threading.Event) -> None:
    desk = Desk(lambda: False, patience=0.1)
    with pytest.raises(UnreachableError):
        desk.call(lambda: the.wait(answer))
    desk.close()
    assert not answer.is_set()


# --- what runs make of it


def test_orders_that_are_read_late_are_not_put_over_newer_ones(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, clock: Clock, answer: threading.Event
) -> None:
    """Forced: a thread has read them and is stuck, another one reads a pause, the first goes on."""
    real, is_read = orders.read_orders, threading.Event()

    def read(names: Collection[str]) -> Mapping[str, orders.Orders]:
        found = real(names)
        if is_old():
            is_read.set()
            the.wait(answer)
            # As if the answer itself had been late.
            now = time.monotonic()
            found = {name: replace(each, read_at=now) for name, each in found.items()}
        return found

    def is_old() -> bool:
        return armed.is_set() and not is_read.is_set()

    armed = threading.Event()
    monkeypatch.setattr(process, "read_orders", read)
    record = ledger.command("watch", [NAME])
    old = ledger.desk._line
    assert old is not None
    armed.set()
    clock.now += POLL
    the.wait(is_read)
    api.pause(NAME)
    clock.now += DEAD
    ledger.desk.relieve()
    until(lambda: ledger.orders[NAME].is_paused, "the new thread to read the pause")
    answer.set()
    old.join(the.PATIENCE)
    assert ledger.orders[NAME].is_paused
    ledger.end_command(record, None)


class Elsewhere:
    """Routes the ledger to the alias whose connections a test can cut."""

    def db_for_read(self, model: Any, **_: Any) -> str | None:
        return "other" if model._meta.app_label == "dcl_processor_ledger" else None

    db_for_write = db_for_read


def test_a_run_whose_ledger_has_a_dead_connection_still_follows_orders_and_is_recorded(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """The wire carries nothing any more, and neither side learns of it."""
    the.errands(2)
    monkeypatch.setattr(module, "LOOK_EVERY", 0.01)
    monkeypatch.setattr(module, "POLL", 0.01)
    lines: list[_Line | None] = []

    def handle(row: Errand) -> None:
        lines.append(ledger.desk._line)
        wire.armed.set()
        clock.now += 1
        the.wait(wire.made)
        api.pause(NAME)
        clock.now += DEAD
        until(lambda: ledger.orders[NAME].is_paused, "the pause to be read")

    with (
        override_settings(DATABASE_ROUTERS=[Elsewhere()]),
        cut(b"dcl_processor_ledger_control", silent=True, armed=False) as wire,
    ):
        report = processor(handle)()
        assert_run(report, processed=1, stopped="paused")
        (found,) = api.history(NAME)
        assert (found.state, found.counts["processed"]) == ("finished", 1)
        ledger.desk.close()
    assert lines[0] is not None
    lines[0].join(the.PATIENCE)


def test_a_run_of_many_rows_is_written_once_a_second(
    ledger: Ledger, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the rows takes a quarter of a second."""
    values, writes = Work._values, list[float]()

    def write(*what: Any, **how: Any) -> Any:
        writes.append(clock.now)
        return values(*what, **how)

    def handle(_: Errand) -> None:
        clock.now += 0.25
        ledger.desk.call(lambda: None)  # wakes its thread

    monkeypatch.setattr(Work, "_values", write)
    the.errands(40)
    processor(handle)()
    assert 5 <= len(writes) <= 12  # 10 seconds, their begin and their end


def test_a_ledger_that_does_not_answer_costs_one_wait_and_not_one_for_each_row(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, answer: threading.Event
) -> None:
    the.errands(30)
    calls, waits = [], []
    pause_longer = ledger.desk._pause_longer

    def failed(*_: Any) -> None:
        calls.append(0)
        the.wait(answer)

    def wait() -> None:
        waits.append(0)
        pause_longer()

    monkeypatch.setattr(orders, "count_failure", failed)
    monkeypatch.setattr(ledger.desk, "_pause_longer", wait)

    def fail_soon(row: Errand) -> None:
        ledger.desk._patience = 0.5  # not before the ledger was asked for the first time
        fail(row)

    report = processor(fail_soon, breaker=Breaker(3))()
    assert_run(report, failed=30)
    assert len(calls) == 1
    assert len(waits) < 10  # and not one for each row


def test_the_session_of_the_ledger_ends_sooner_than_a_database_can_be_dropped(
    ledger: Ledger,
) -> None:
    """PostgreSQL waits for other sessions, but no more than 5 seconds."""
    the.errands(1)
    processor(the.ignore)()
    began = time.monotonic()
    until(lambda: ledger.desk._line is None, "the thread to end")
    assert time.monotonic() - began < 4
