"""Observers and signals: what they learn, in which process, and what they cost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from django.db import connection
from django.dispatch import Signal

from dcl_processor import Retry, Snooze, observers
from dcl_processor.contrib.prometheus import exposition
from dcl_processor.contrib.prometheus.exposition import Counts
from dcl_processor.engine import calls
from dcl_processor.exceptions import HandlerTimeout
from dcl_processor.log_fields import Running
from dcl_processor.metrics import LAST_SUCCESS
from dcl_processor.observers import Handling, Observer
from dcl_processor.report.report import Report
from dcl_processor.signals import row_finished, row_started, run_finished, run_started
from tests.contract.support import errands as the
from tests.contract.support.onlookers import exporting, looking_on
from tests.models import Errand
from tests.test_counts import traced

pytestmark = pytest.mark.django_db(transaction=True)


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


class Noting(Observer):
    """Keeps what it learns."""

    def __init__(self) -> None:
        self.notes: list[tuple[Any, ...]] = []

    def run_started(self, running: Running) -> None:
        self.notes.append(("run_started", running.name))

    def claimed(self, name: str, ages: Sequence[float]) -> None:
        self.notes.append(("claimed", len(ages)))

    def unlocked(self, name: str, seconds: float) -> None:
        self.notes.append(("unlocked", seconds >= 0))

    def handler_started(self, handling: Handling) -> None:
        self.notes.append(("handler_started", len(handling.call.keys)))

    def handler_ended(self, handling: Handling, error: BaseException | None) -> None:
        self.notes.append(("handler_ended", type(error).__name__))

    def row_ended(self, name: str, outcome: str, *, is_retried: bool) -> None:
        self.notes.append(("row_ended", outcome, is_retried))

    def run_ended(self, running: Running, report: Report, error: BaseException | None) -> None:
        self.notes.append(("run_ended", report.stopped, type(error).__name__))


def test_the_signals_are_sent_in_the_order_of_a_row() -> None:
    [row] = the.errands(1)

    def fail(_: Errand) -> None:
        time.sleep(0.01)
        raise ValueError

    processor = the.at_least_once(fail, retry=the.retry())
    with received(run_started, row_started, row_finished, run_finished) as sent:
        processor.run()
    assert [signal for signal, _ in sent] == [run_started, row_started, row_finished, run_finished]
    assert {each["sender"] for _, each in sent} == {type(processor)}
    assert all(each["processor"] is processor for _, each in sent)
    started, finished = sent[1][1], sent[2][1]
    assert (started["pk"], started["attempt"]) == (row.pk, 1)
    assert (finished["pk"], finished["outcome"], finished["attempt"]) == (row.pk, "failed", 1)
    assert 0.01 <= finished["duration"] < 5.0
    assert len(sent[0][1]["run_id"]) == 32


def test_a_batch_has_a_signal_for_each_of_its_rows() -> None:
    rows = the.errands(3)
    together = the.transactional(the.ignore, process_batch=the.ignore, batch_size=3)
    noting = Noting()
    with looking_on(noting), received(row_started) as sent:
        together.run()
    assert [each["pk"] for _, each in sent] == [row.pk for row in rows]
    assert noting.notes.count(("handler_started", 3)) == 1


def as_coroutine(handle: Callable[[Errand], None]) -> Callable[[Errand], Any]:
    async def handler(row: Errand) -> None:
        handle(row)

    return handler


@pytest.mark.parametrize("kind", [lambda handle: handle, as_coroutine], ids=["def", "async def"])
def test_a_receiver_has_the_limit_of_the_handler_and_is_seen(
    kind: Callable[[Callable[[Errand], None]], Any],
) -> None:
    """Its row is at hand before, so that what looks at the worker can name it."""
    [row] = the.errands(1)
    seen: list[Any] = []
    began: list[int] = []
    over = threading.Event()

    def receive(pk: Any, **_: Any) -> None:
        seen.append([call.keys[0] for call in calls.under_way()])
        while not over.wait(0.01):
            """Be interrupted."""

    class Ending(Observer):
        def handler_ended(self, handling: Handling, error: BaseException | None) -> None:
            over.set()
            # The handler was not called, so it has no duration.
            seen.append((type(error), handling.call.duration))

    row_started.connect(receive)
    try:
        with looking_on(Ending()):
            report = the.at_least_once(
                kind(lambda row: began.append(row.pk)), handler_timeout=1
            ).run()
    finally:
        row_started.disconnect(receive)
    assert (seen, began) == ([[row.pk], (HandlerTimeout, None)], [])
    assert [type(each.error) for each in report.failures] == [HandlerTimeout]


def test_a_receiver_that_raises_costs_no_row() -> None:
    the.errands(2)

    def receive(**_: Any) -> None:
        raise ValueError

    signals = (run_started, row_started, row_finished, run_finished)
    for each in signals:
        each.connect(receive)
    try:
        assert the.transactional(lambda row: None).run().processed == 2
    finally:
        for each in signals:
            each.disconnect(receive)


@pytest.mark.parametrize("make", [the.transactional, the.at_most_once, the.at_least_once])
def test_an_observer_learns_each_step(make: the.Make) -> None:
    the.errands(1)
    noting = Noting()
    with looking_on(noting):
        make(lambda row: None, name="shop.step").run()
    assert sorted(noting.notes) == sorted(
        [
            ("run_started", "shop.step"),
            ("claimed", 0),
            ("unlocked", True),
            ("handler_started", 1),
            ("handler_ended", "NoneType"),
            ("row_ended", "processed", False),
            ("run_ended", "drained", "NoneType"),
        ]
    )


def test_a_lock_is_held_until_its_commit_is_answered() -> None:
    the.errands(3)
    committed: list[int] = []

    class Locks(Observer):
        held: list[float] = []

        def unlocked(self, name: str, seconds: float) -> None:
            self.held.append(seconds)
            # As another session sees it.
            with other_connection() as cursor:
                cursor.execute("SELECT count(*) FROM tests_errand WHERE done")
                committed.append(cursor.fetchone()[0])

    with looking_on(locks := Locks()):
        the.transactional(lambda row: time.sleep(0.02)).run()
    assert committed == [1, 2, 3]
    assert all(0.02 <= each < 5.0 for each in locks.held)


@contextmanager
def other_connection() -> Iterator[Any]:
    other = connection.copy()
    try:
        with other.cursor() as cursor:
            yield cursor
    finally:
        other.close()


def test_the_age_of_a_row_is_measured_at_its_claim() -> None:
    from datetime import timedelta

    from django.utils import timezone

    the.errands(1, claimed_at=timezone.now() - timedelta(minutes=5))
    the.errands(1, claimed_at=None)
    counts = Counts()
    with looking_on(counts):
        the.transactional(lambda row: None, name="shop.age", pending_since="claimed_at").run()
    found = {name: value for (name, _), value in counts.samples().items()}
    assert found[f"{exposition.AGE}_count"] == 1
    assert 299.0 < found[f"{exposition.AGE}_sum"] < 330.0


def test_outcomes_retries_and_lost_leases_are_counted() -> None:
    the.errands(4)

    def handle(row: Errand) -> None:
        match row.place:
            case 0:
                raise ValueError
            case 1:
                raise Snooze(delay=60)
            case 2:
                Errand.objects.filter(pk=row.pk).update(leased_until=None)

    retry = Retry(3, backoff=60, jitter=0)
    counts = Counts()
    with looking_on(counts):
        the.at_least_once(handle, name="shop.outcomes", retry=retry).run()
    found = {name: value for (name, _), value in counts.samples().items()}
    rows = [dict(labels).get("outcome") for (_, labels), n in counts.samples().items() if n == 1]
    assert {*rows} - {None} == {"processed", "failed", "snoozed"}
    assert found[f"{exposition.RETRIES}_total"] == found[f"{exposition.LOST_LEASES}_total"] == 1
    assert found[f"{exposition.HANDLER}_count"] == 4
    assert LAST_SUCCESS in found  # the failed row is to be tried again


class Raising(Observer):
    """Is an exporter that is broken everywhere."""

    def __getattribute__(self, name: str) -> Any:
        if name in vars(Observer) and not name.startswith("_"):

            def fail(*_: Any, **__: Any) -> None:
                raise SystemExit("postgres://shop:hunter2@db/x")

            return fail
        return super().__getattribute__(name)


@pytest.mark.parametrize("make", [the.transactional, the.at_most_once, the.at_least_once])
def test_an_observer_that_raises_costs_no_row(
    make: the.Make, caplog: pytest.LogCaptureFixture
) -> None:
    the.errands(3)
    with looking_on(Raising()):
        report = make(lambda row: None).run()
        observers.tell("flush")
    assert (report.processed, report.stopped) == (3, "drained")
    assert Errand.objects.filter(done=True).count() == 3
    assert "SystemExit: postgres://shop:***@db/x" in caplog.text
    assert "hunter2" not in caplog.text
    raised = [each.getMessage() for each in caplog.records if "raised" in each.getMessage()]
    assert sorted(each.partition(" ")[0] for each in raised) == sorted(
        f"Raising.{name}()"
        for name in (
            *("run_started", "claimed", "unlocked", "handler_started", "handler_ended"),
            *("row_ended", "run_ended", "flush"),
        )
    )


def test_an_observer_costs_no_statement_and_no_round_trip() -> None:
    def messages() -> int:
        Errand.objects.all().delete()
        the.errands(10)
        processor = the.transactional(lambda row: None, pending_since="claimed_at")
        with traced() as sent:
            assert processor.run().processed == 10
        return len(sent)

    messages()
    alone = messages()
    with looking_on(Noting(), Counts()), exporting():
        assert messages() == alone
