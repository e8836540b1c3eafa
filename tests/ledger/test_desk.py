"""The ledger's thread, whose database does not answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from dcl_processor.ledger import desk as module
from dcl_processor.ledger import ledger as process
from dcl_processor.ledger.desk import Desk, UnreachableError
from dcl_processor.ledger.ledger import Ledger
from dcl_processor.ledger.recording import Work
from tests.contract.support import errands as the
from tests.contract.support.reports import assert_run
from tests.models import Errand
from tests.waiting import until

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


NAME = "shop.silent"


def processor(handler: Any, **options: Any) -> Any:
    return the.transactional(handler, name=NAME, **options)


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
    desk._post(lambda: None).result(the.PATIENCE)  # which is behind it in the queue
    desk.close()
    assert asked == []


def test_a_read_that_succeeds_ends_the_pause() -> None:
    read = threading.Event()

    def tick() -> bool:
        read.set()
        return True

    desk = Desk(tick)
    desk._be_silent()
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


def test_an_end_does_not_wait_for_a_thread_that_is_stuck(answer: threading.Event) -> None:
    desk = Desk(lambda: False, patience=0.1)
    with pytest.raises(UnreachableError):
        desk.call(lambda: the.wait(answer))
    desk.close()
    assert not answer.is_set()


# --- what runs make of it


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


def test_a_ledger_that_does_not_answer_costs_one_wait_and_not_one_for_each_run(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, answer: threading.Event
) -> None:
    calls, waits = [], []
    be_silent = ledger.desk._be_silent

    def silent(*_: Any) -> None:
        calls.append(0)
        the.wait(answer)

    def wait() -> None:
        waits.append(0)
        be_silent()

    monkeypatch.setattr(process, "read_orders", silent)
    monkeypatch.setattr(ledger.desk, "_be_silent", wait)
    ledger.desk._patience = 0.5
    for row in the.errands(5):
        assert_run(processor(the.ignore)(filter=the.only(row)), processed=1)
    assert (calls, waits) == ([0], [0])


def test_the_session_of_the_ledger_ends_sooner_than_a_database_can_be_dropped(
    ledger: Ledger,
) -> None:
    """PostgreSQL waits for other sessions, but no more than 5 seconds."""
    the.errands(1)
    processor(the.ignore)()
    began = time.monotonic()
    until(lambda: ledger.desk._thread is None, "the thread to end")
    assert time.monotonic() - began < 4
