"""``race()``: a right processor passes, a broken one is caught each time and shows how."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import transaction
from django.db.models import QuerySet
from django.test import TestCase

from dcl_processor import BatchProcessor
from dcl_processor.exceptions import RowsFailed, Unsupported
from dcl_processor.pending.question import Question, RowFilter
from dcl_processor.testing import race, racing
from tests import seams
from tests.contract.support.errands import (
    PENDING,
    at_least_once,
    at_most_once,
    errands,
    ignore,
    retry,
    transactional,
)
from tests.contract.support.gate import HAS_ROW_LOCKS
from tests.contract.support.reports import assert_run
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


def spanning(handler: Callable[..., Any], **options: Any) -> BatchProcessor[Errand]:
    """Ask in two statements: what comes through a subquery cannot be asked with the lock."""
    asked = Errand.objects.filter(pk__in=PENDING.values("pk"))
    return transactional(handler, pending=asked, **options)


async def touch(row: Errand) -> None:
    """Handle a row on the event loop, with a look into the database."""
    assert await sync_to_async(Errand.objects.filter(pk=row.pk).exists)()


RIGHT: dict[str, Callable[[], BatchProcessor[Any]]] = {
    "transactional": lambda: transactional(ignore),
    "spanning": lambda: spanning(ignore),
    "batches": lambda: transactional(ignore, batch_size=2),
    "process_batch": lambda: transactional(ignore, process_batch=ignore, batch_size=2),
    "at most once": lambda: at_most_once(ignore),
    "at least once": lambda: at_least_once(ignore, retry=retry()),
    "async at most once": lambda: at_most_once(touch),
    "async at least once": lambda: at_least_once(touch),
}


if not HAS_ROW_LOCKS:

    def test_a_database_without_row_locks_is_refused() -> None:
        errands(1)
        with pytest.raises(Unsupported, match="got SQLite, which has one lock for all"):
            race(transactional(ignore))


if HAS_ROW_LOCKS:

    @pytest.mark.parametrize("make", RIGHT.values(), ids=RIGHT)
    @pytest.mark.parametrize("workers", [2, 4])
    def test_a_right_processor_passes(make: Callable[[], Any], workers: int) -> None:
        rows = errands(5)
        result = race(make(), workers=workers)
        assert result.raise_for_failures() is result
        assert set(result.handled) == {row.pk for row in rows}
        assert {len(by) for by in result.handled.values()} == {1}
        assert (len(result.reports), result.processed) == (workers, 5)
        assert not PENDING.all().exists()
        assert not _copies_left()

    def _copies_left() -> list[str]:
        return [each.name for each in threading.enumerate() if ": worker " in each.name]

    def test_the_copies_meet_at_a_row_that_is_locked_and_at_one_that_is_finished() -> None:
        [row] = errands(1)
        result = race(transactional(ignore), workers=3)
        # The second met it locked and came back to it, the third asked again and found it done.
        assert result.handled == {row.pk: (1,)}
        first, second, third = result.reports
        assert_run(first, processed=1)
        assert_run(second, stale=1)
        assert_run(third, stale=1)
        lines = [" ".join(line.split()[1:]) for line in result.trace.splitlines()]
        candidates = [place for place, line in enumerate(lines) if "SELECT tests_errand" in line]
        lock = next(place for place, line in enumerate(lines) if line.startswith("lock SELECT"))
        assert sum(place < lock for place in candidates) >= 3

    def narrowed_without_the_question(
        question: Question[Any], those: RowFilter
    ) -> QuerySet[Any, Any]:
        rows: QuerySet[Any] = QuerySet(question.model, using=question.using)
        return rows.filter(those.condition).order_by()

    @pytest.mark.parametrize("workers", [2, 4])
    @pytest.mark.parametrize("make", [transactional, spanning, at_most_once, at_least_once])
    def test_a_missing_second_check_is_caught(
        make: Callable[..., Any], workers: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Question, "narrowed", narrowed_without_the_question)
        rows = errands(3)
        handled: list[int] = []
        with pytest.raises(AssertionError) as caught:
            race(make(lambda row: handled.append(row.pk)), workers=workers)
        said = str(caught.value)
        assert "expected each row to be handled by one worker, got row" in said
        # A claim and a lease are part of the question: without it the second worker takes a row
        # that is still at work.
        marked = make in {at_most_once, at_least_once}
        had = "not finished" if marked and workers > 2 else "finished"
        assert f"{rows[0].pk} handled by worker 1, which had {had} it, and again by worker" in said
        assert "seed=0" in said
        assert f"worker {workers}" in said
        assert said.endswith(f"row {rows[0].pk} again!")
        # The second handler was not called any more.
        assert len(handled) == len(set(handled))
        assert not _copies_left()

    @pytest.mark.parametrize("make", [transactional, spanning])
    def test_a_missing_lock_is_caught(
        make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seams.replace(monkeypatch, seams.LOCK_CLAUSE, lambda *_: "")
        monkeypatch.setattr(racing, "PATIENCE", 0.5)
        errands(3)
        # On MariaDB the rehearsal of the flip waits for the first worker, which has finished then.
        with pytest.raises(AssertionError, match=r"got row \d+ handled by worker \d, which had"):
            race(make(ignore), workers=3)

    def test_what_a_handler_asserts_reaches_the_test_with_its_traceback() -> None:
        errands(3)

        def handle(row: Errand) -> None:
            assert row.place != 1, "wrong place"

        for make in (transactional, at_least_once):
            with pytest.raises(AssertionError, match="wrong place") as caught:
                race(make(handle), workers=2)
            frames = traceback.extract_tb(caught.value.__traceback__)
            assert any(frame.name == "handle" for frame in frames)
        assert not _copies_left()

    def test_rows_that_fail_are_tried_by_each_copy_and_are_no_double() -> None:
        bad, good = errands(2)

        def handle(row: Errand) -> None:
            if row.pk == bad.pk:
                raise ValueError("bad")

        result = race(transactional(handle), workers=2)
        assert result.handled[good.pk] in {(1,), (2,)}
        assert set(result.handled[bad.pk]) == {1, 2}
        with pytest.raises(RowsFailed):
            result.raise_for_failures()

    def test_a_race_for_nothing_is_refused() -> None:
        with pytest.raises(AssertionError, match="expected pending rows to race for, got none"):
            race(transactional(ignore), workers=2)

    def test_a_race_that_goes_on_for_too_long_is_called_off() -> None:
        errands(2)
        over = threading.Event()
        with pytest.raises(AssertionError, match="expected the race to end before its timeout"):
            race(transactional(lambda row: over.wait(1.5)), workers=2, timeout=1)
        assert not _copies_left()

    class InTestCase(TestCase):
        def test_it_is_refused(self) -> None:
            errands(1)
            with pytest.raises(Unsupported, match="use TransactionTestCase"):
                race(transactional(ignore))
            with transaction.atomic(), pytest.raises(Unsupported, match="TestCase"):
                race(transactional(ignore))
