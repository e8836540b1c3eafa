"""Signals: what receivers learn, and when; and what observers leave for the handler."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from itertools import product
from typing import Any

import pytest
from django.dispatch import Signal

from dcl_processor.report.observer import RowEvent, RunEvent
from dcl_processor.signals import row_finished, row_started, run_finished, run_started
from tests.contract.support import errands as the
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True)

ALL = (run_started, row_started, row_finished, run_finished)


@contextmanager
def received(*signals: Signal) -> Iterator[list[tuple[Signal, dict[str, Any]]]]:
    found: list[tuple[Signal, dict[str, Any]]] = []
    with ExitStack() as stack:
        for each in signals:

            def receive(signal: Signal, **sent: Any) -> None:
                found.append((signal, sent))

            each.connect(receive, weak=False)
            stack.callback(each.disconnect, receive)
        yield found


def test_the_signals_are_sent_in_the_order_of_a_row() -> None:
    [row] = the.errands(1)

    def fail(_: Errand) -> None:
        time.sleep(0.01)
        raise ValueError

    processor = the.at_least_once(fail, retry=the.retry())
    with received(*ALL) as sent:
        report = processor.run()
    assert [signal for signal, _ in sent] == [*ALL]
    assert {each["sender"] for _, each in sent} == {type(processor)}
    assert all(each["processor"] is processor for _, each in sent)
    began, started, finished, ended = [each for _, each in sent]
    assert (started["pk"], started["attempt"]) == (row.pk, 1)
    assert (finished["pk"], finished["outcome"], finished["attempt"]) == (row.pk, "failed", 1)
    assert 0.01 <= finished["duration"] < 5.0
    assert len(began["run_id"]) == 32
    assert ended["report"] is report


def test_a_run_that_raises_sends_no_report() -> None:
    the.errands(1)
    with received(run_started, run_finished) as sent, pytest.raises(KeyboardInterrupt):
        the.transactional(the.raising(KeyboardInterrupt())).run()
    assert [signal for signal, _ in sent] == [run_started]


# --- the context


AT_HAND: ContextVar[Any] = ContextVar("at_hand", default=None)


class Setting:
    """Sets a variable before each row, as a tracer does with its span."""

    def __init__(self) -> None:
        self.between: list[Any] = []

    def run(self, event: RunEvent) -> None:
        self.between.append(AT_HAND.get())

    def row(self, event: RowEvent) -> None:
        self.between.append(AT_HAND.get())
        if event.kind == "started":
            AT_HAND.set(event.pk)


@pytest.mark.parametrize(
    ("make", "is_async", "concurrency"),
    [
        (the.transactional, False, 1),
        *product((the.at_most_once, the.at_least_once), (False, True), (1, 3)),
    ],
)
def test_what_an_observer_sets_is_set_in_the_handler_and_nowhere_else(
    make: the.Make, is_async: bool, concurrency: int
) -> None:
    the.errands(5)
    seen: list[tuple[Any, Any]] = []
    setting = Setting()

    def handle(row: Errand) -> None:
        seen.append((row.pk, AT_HAND.get()))

    async def handle_async(row: Errand) -> None:
        handle(row)

    run = make(handle_async if is_async else handle, observers=[setting])
    assert run(concurrency=concurrency).processed == 5
    assert len(seen) == 5
    assert all(pk == at_hand for pk, at_hand in seen)
    assert setting.between == [None] * 12
