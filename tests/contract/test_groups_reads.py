"""How much of a key a run reads, and what its report counts of rows that others have."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from threading import Event
from typing import Any

import pytest
from django.db import connection
from django.db.models import QuerySet
from django.utils import timezone

from dcl_processor import BatchProcessor
from dcl_processor.candidates import groups as reads
from dcl_processor.candidates import scan
from dcl_processor.candidates.question import ask
from dcl_processor.testing import hold_lock
from tests.contract.support.errands import PENDING, elsewhere, ignore, retry
from tests.contract.support.gate import HAS_GATE, HAS_ROW_LOCKS
from tests.contract.support.groups import (
    MAKERS,
    Make,
    each_at_work,
    grouped,
    in_order,
    keys,
    rows_of,
    run_beside,
)
from tests.contract.support.parcels import processor
from tests.contract.support.reports import assert_run
from tests.contract.support.sessions import before_statement, end_session
from tests.models import Errand, Parcel, Tag

pytestmark = [
    pytest.mark.django_db(transaction=True, databases=["default", "other"]),
    # Left out of a folder's tests by conftest.py; ``make quick`` names its files.
    pytest.mark.skipif(connection.vendor == "mysql", reason="keys are refused there"),
]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Note how many rows each lock-free read of keys and of their rows has returned."""
    numbers: list[int] = []
    look = scan.look

    def counted(rows: QuerySet[Any, Any]) -> list[Any]:
        found = look(rows)
        numbers.append(len(found))
        return found

    monkeypatch.setattr(reads, "look", counted)
    return numbers


def fail(row: Any) -> None:
    raise ValueError(row.pk)


@pytest.mark.parametrize("stays", [False, True])
def test_each_row_of_a_key_whose_rows_stay_pending_is_read_few_times(
    read: list[int], stays: bool
) -> None:
    """Because they failed, or because ``repeats`` leaves them there."""
    rows_of(*[1] * 1000)
    options: dict[str, Any] = {"batch_size": 100, "max_consecutive_failures": 0, "repeats": stays}
    report = grouped("transactional", ignore if stays else fail, **options)()
    assert_run(report, processed=1000 * stays, failed=1000 * (not stays))
    assert sum(read) <= 4 * 1000
    assert len(read) <= 10


def test_each_row_of_a_key_whose_rows_are_given_up_is_read_few_times(read: list[int]) -> None:
    rows_of(*[1] * 300)
    report = in_order("transactional", fail, failed={"dead": True}, max_consecutive_failures=0)()
    assert_run(report, failed=300)
    assert sum(read) <= 5 * 300


def test_a_key_that_is_held_by_its_head_is_read_once_again(read: list[int]) -> None:
    rows_of(*[1] * 300)
    assert_run(in_order("transactional", fail)(), failed=1, held=299)
    # Its rows, the head, and the key for the report; and the keys.
    assert read == [1, 100, 1, 1]


def test_a_row_that_failed_and_waits_is_not_forgotten() -> None:
    """It may be due again before the run ends, and is tried once in a run."""
    finished, waits = rows_of(1, 1)
    Errand.objects.filter(pk=finished.pk).update(done=True)
    later = timezone.now() + timedelta(hours=1)
    Errand.objects.filter(pk=waits.pk).update(next_attempt_at=later)
    keyed = grouped("transactional", ignore, retry=retry())
    question = ask(keyed.pending, label="keyed", due=keyed._due)
    assert not question.queryset.exists()
    assert reads.unfinished(question, {finished.pk, waits.pk}) == {waits.pk}


def tagged(number: int, **columns: Any) -> QuerySet[Parcel]:
    """Make parcels that match their pending queryset five times each."""
    tags = [Tag.objects.create(name="x") for _ in range(5)]
    for _ in range(number):
        Parcel.objects.create(**columns).tags.set(tags)
    return Parcel.objects.filter(sent=False, tags__name="x")


def test_rows_that_match_several_times_are_all_tried() -> None:
    pending = tagged(60, weight=1)
    options: dict[str, Any] = {"max_consecutive_failures": 0, "batch_size": 60}
    report = processor(fail, pending=pending, group_by="weight", **options)()
    assert_run(report, failed=60)


def test_held_rows_that_match_several_times_are_counted_once() -> None:
    pending = tagged(3, weight=1)
    report = processor(fail, pending=pending, group_by="weight", in_order=True)()
    assert_run(report, failed=1, held=2)


def test_only_keys_with_held_rows_are_named() -> None:
    rows = rows_of(1, 1, 2, 2)

    def finish_one_and_fail(_: Errand) -> None:
        elsewhere(lambda: Errand.objects.filter(pk=rows[1].pk).update(done=True))
        raise ValueError

    report = in_order("at_least_once", finish_one_and_fail)()
    assert_run(report, failed=2, held=1)
    assert report.held_keys == (2,)


if HAS_GATE:

    class Whole(BatchProcessor[Errand]):
        """Gets the rows of a key together."""

        group_by = "place"
        batch_size = 2
        done = {"done": True}

        def pending(self) -> QuerySet[Errand]:
            return PENDING.all()

        def process_batch(self, rows: Sequence[Errand], /, *arguments: Any) -> None:
            pass

    class NoWait(Event):
        """A stop that no run waits for."""

        def wait(self, timeout: float | None = None) -> bool:
            raise AssertionError(f"expected no wait, and the run waits for {timeout} s")

    def test_a_key_whose_first_rows_are_finished_is_called_for_the_others() -> None:
        """Interleaving: the key is read; another session finishes two rows; the key is locked."""
        finished = keys(rows_of(1, 1, 1))[:2]

        def finish() -> None:
            elsewhere(lambda: Errand.objects.filter(pk__in=finished).update(done=True))

        with before_statement(lambda sql: "pg_try_advisory_xact_lock" in sql, finish):
            report = Whole()(wait_for_locked=30, stop=NoWait())
        assert_run(report, processed=1, stale=2)


@each_at_work
@pytest.mark.parametrize("make", [grouped, in_order])
def test_a_row_that_another_session_finished_is_stale(delivery: str, make: Make) -> None:
    one, two, three = rows_of(1, 1, 1)
    handled: list[int] = []

    def finish_the_next(row: Errand) -> None:
        handled.append(row.pk)
        if row.pk == one.pk:
            elsewhere(lambda: Errand.objects.filter(pk=two.pk).update(done=True))

    assert_run(make(delivery, finish_the_next)(), processed=2, stale=1)
    assert handled == [one.pk, three.pk]


if HAS_ROW_LOCKS:

    @pytest.mark.parametrize("delivery", MAKERS)
    @pytest.mark.parametrize(("make", "processed"), [(grouped, 1), (in_order, 0)])
    def test_a_row_that_another_session_has_locked_is_skipped(
        delivery: str, make: Make, processed: int
    ) -> None:
        one, _ = rows_of(1, 1)
        with hold_lock(one):
            report, _ = run_beside(make, delivery)
        assert_run(report, processed=processed, skipped=1, held=1 - processed)
        assert report.held_keys == (() if processed else (1,))

    def test_locked_rows_of_many_keys_are_each_skipped_once(
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """The run looks them up several times, because there are more than a window."""
        monkeypatch.setattr("dcl_processor.candidates.scan.WINDOW", 2)
        rows = rows_of(*range(7))
        with ExitStack() as locks:
            for row in rows:
                locks.enter_context(hold_lock(row))
            report, _ = run_beside(in_order, "transactional")
        assert_run(report, skipped=7)


def test_rows_of_a_batch_that_was_rolled_back_are_counted_once() -> None:
    """Otherwise the run would stop as many rows too early, and say that it is drained."""
    rows = rows_of(*[1] * 250)

    def flip(row: Errand) -> dict[str, Any]:
        return {"done": True, "result": None if row.pk == rows[20].pk else ""}

    report = grouped("transactional", ignore, done=flip, batch_size=100)()
    assert_run(report, processed=249, failed=1)
    assert not Errand.objects.filter(done=False).exclude(pk=rows[20].pk).exists()


if connection.vendor == "postgresql":

    def test_a_session_that_ends_at_the_look_at_the_collation_is_replaced() -> None:
        rows_of(1)
        ended = partial(end_session, connection)
        with before_statement(lambda sql: "pg_collation" in sql, ended):
            report = grouped("transactional", ignore, group_by="result")(using="default")
        assert_run(report, processed=1)
