"""The two doors of a run: observers, which look on, and gates, which let rows start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from threading import Event
from typing import Any

import pytest
from django.db import connection

from dcl_processor import Discard
from dcl_processor.report import observer
from dcl_processor.report.observer import EndRun, RowEvent, RunEvent
from tests.contract.support import errands as the
from tests.contract.support.reports import assert_run
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True)


class Noting:
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.runs: list[RunEvent] = []
        self.rows: list[RowEvent] = []

    def run(self, event: RunEvent) -> None:
        self.runs.append(event)

    def row(self, event: RowEvent) -> None:
        self.rows.append(event)


class Open:
    """A gate that is open, and keeps what it was asked and told."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.told: list[Any] = []

    def may_start(self, n: int) -> int:
        self.asked.append(n)
        return n

    def ended(self, outcomes: Sequence[Any]) -> None:
        self.told += outcomes


# --- observers


@the.all_deliveries
def test_an_observer_learns_the_run_and_each_row(make: the.Make) -> None:
    [first, second, third] = the.errands(3)

    def handle(row: Errand) -> None:
        if row.place == 1:
            raise ValueError("no")
        if row.place == 2:
            raise Discard("never")

    noting = Noting()
    processor = make(handle, observers=[noting], failed={"dead": True})
    report = processor()
    begun, ended = noting.runs
    assert (begun.kind, begun.processor, begun.report) == ("started", processor, None)
    assert (ended.kind, ended.report, ended.error) == ("ended", report, None)
    assert begun.run_id == ended.run_id
    assert begun.using == "default"
    assert [(each.kind, each.pk, each.outcome) for each in noting.rows] == [
        ("started", first.pk, None),
        ("ended", first.pk, "processed"),
        ("started", second.pk, None),
        ("ended", second.pk, "failed"),
        ("started", third.pk, None),
        ("ended", third.pk, "discarded"),
    ]
    assert repr(noting.rows[3].error) == "ValueError('no')"
    assert {each.run_id for each in noting.rows} == {begun.run_id}
    assert noting.rows[1].duration is not None


def test_an_observer_learns_the_attempt_and_whether_there_is_another() -> None:
    the.errands(1)
    noting = Noting()
    processor = the.transactional(
        the.raising(ValueError()), retry=the.retry(max_attempts=2), observers=[noting]
    )
    processor()
    processor()
    known = [(each.kind, each.attempt, each.is_retried) for each in noting.rows]
    assert known == [
        ("started", 1, False),
        ("ended", 1, True),
        ("started", 2, False),
        ("ended", 2, False),
    ]


def test_an_observer_learns_the_end_of_a_row_after_its_commit() -> None:
    the.errands(3)
    seen: list[tuple[str, int, int]] = []

    class Looking(Noting):
        def row(self, event: RowEvent) -> None:
            done = the.elsewhere(Errand.objects.filter(done=True).count)
            seen.append((event.kind, event.together, done))

    together = the.transactional(
        the.ignore, process_batch=the.ignore, batch_size=3, observers=[Looking()]
    )
    together()
    assert seen == [("started", 3, 0)] * 3 + [("ended", 1, 3)] * 3


@the.all_deliveries
def test_an_observer_that_raises_is_logged_once_for_each_method_and_costs_no_row(
    make: the.Make, caplog: pytest.LogCaptureFixture
) -> None:
    the.errands(3)

    class Broken:
        def run(self, event: RunEvent | RowEvent) -> None:
            raise ValueError("no collector at postgres://shop:hunter2@db/x")

        row = run

    noting = Noting()
    assert_run(make(the.ignore, observers=[Broken(), noting])(), processed=3)
    assert len(noting.rows) == 6
    assert "hunter2" not in caplog.text
    told = [each.getMessage() for each in caplog.records if "Broken" in each.getMessage()]
    assert told == [
        f"Broken.{method}() raised, and the run goes on: no collector at postgres://shop:***@db/x"
        for method in ("run", "row")
    ]


def test_a_run_that_raises_tells_its_observers_why() -> None:
    the.errands(2)

    def handle(row: Errand) -> None:
        if row.place == 1:
            raise KeyboardInterrupt

    noting = Noting()
    with pytest.raises(KeyboardInterrupt):
        the.transactional(handle, observers=[noting])()
    ended = noting.runs[-1]
    assert isinstance(ended.error, KeyboardInterrupt)
    assert ended.report is not None
    assert (ended.report.processed, ended.report.stopped) == (1, "signal")


@pytest.fixture
def installed() -> Iterator[list[Any]]:
    """Return the list of what apps have installed, and set it back."""
    before = [*observer.observers_installed]
    yield observer.observers_installed
    observer.observers_installed[:] = before


def test_an_app_installs_an_observer_of_the_runs_that_it_chooses(installed: list[Any]) -> None:
    the.errands(2)
    noting = Noting()
    installed.append(lambda processor: noting if processor.name == "shop.watched" else None)
    the.transactional(the.ignore, name="shop.other")(limit=1)
    assert noting.runs == []
    the.transactional(the.ignore, name="shop.watched")()
    assert len(noting.runs) == len(noting.rows) == 2


def test_what_an_app_has_installed_is_asked_last_if_it_is_a_gate(installed: list[Any]) -> None:
    the.errands(3)

    class Both(Open, Noting):
        def __init__(self) -> None:
            Open.__init__(self)
            Noting.__init__(self)

    class Half(Open):
        def may_start(self, n: int) -> int:
            return super().may_start(n) // 2 or 1

    both, half = Both(), Half()
    installed.append(lambda _: both)
    assert_run(the.transactional(the.ignore, batch_size=2, gates=[half])(), processed=3)
    assert both.asked == [1, 1, 1]
    assert len(both.told) == 3


# --- gates


@the.all_deliveries
def test_a_gate_lets_so_many_rows_start_and_learns_what_became_of_them(make: the.Make) -> None:
    the.errands(5)
    stop = Event()

    class Three(Open):
        def may_start(self, n: int) -> int:
            if len(self.asked) < 3:
                return super().may_start(min(n, 1))
            stop.set()  # while the run waits for this gate
            return 0

    def handle(row: Errand) -> None:
        if row.place == 1:
            raise ValueError

    gate = Three()
    report = make(handle, batch_size=5, gates=[gate])(stop=stop)
    assert_run(report, processed=2, failed=1, stopped="signal")
    assert [type(each).__name__ for each in gate.told] == ["Handled", "Failed", "Handled"]


@the.all_deliveries
def test_a_gate_ends_a_run_with_its_own_reason(make: the.Make) -> None:
    the.errands(5)

    class OneBatch(Open):
        def may_start(self, n: int) -> int:
            if self.asked:
                raise EndRun("the quota of the day is used up")
            return super().may_start(n)

    gate = OneBatch()
    report = make(the.ignore, batch_size=2, gates=[gate])()
    assert report.stopped == "the quota of the day is used up"
    assert report.ok
    assert report.processed == len(gate.told) == gate.asked[0]
    assert str(report).endswith("; stopped by the quota of the day is used up")


def test_an_empty_run_asks_no_gate() -> None:
    gate = Open()
    assert_run(the.transactional(the.ignore, gates=[gate])())
    assert gate.asked == []


@the.all_deliveries
def test_a_gate_is_asked_and_told_outside_any_transaction(make: the.Make) -> None:
    the.errands(2)
    inside: list[bool] = []

    class Looking(Open):
        def may_start(self, n: int) -> int:
            inside.append(connection.in_atomic_block)
            return n

        def ended(self, outcomes: Sequence[Any]) -> None:
            inside.append(connection.in_atomic_block)

    assert_run(make(the.ignore, gates=[Looking()])(), processed=2)
    assert inside == [False] * 4


def test_an_error_of_a_gate_ends_the_run() -> None:
    the.errands(1)

    class Broken(Open):
        def may_start(self, n: int) -> int:
            raise OSError("no quota server")

    with pytest.raises(OSError, match="no quota server"):
        the.transactional(the.ignore, gates=[Broken()])()
    assert the.places(done=False) == [0]
