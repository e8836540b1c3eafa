"""``race()``: a right processor passes, and a broken one is caught each time."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import transaction
from django.test import TestCase

from dcl_processor import BatchProcessor
from dcl_processor.exceptions import RowsFailed, Unsupported
from dcl_processor.testing import race
from tests import seams
from tests.contract.support.errands import (
    PENDING,
    at_least_once,
    at_most_once,
    errands,
    ignore,
    raising,
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
    def test_a_right_processor_passes(make: Callable[[], Any]) -> None:
        errands(5)
        reports = race(make())
        assert len(reports) == 3
        assert sum(report.raise_for_failures().processed for report in reports) == 5
        assert not PENDING.all().exists()

    def test_the_workers_meet_at_a_row_that_is_locked_and_at_one_that_is_finished() -> None:
        errands(2)
        first, second, third = race(transactional(ignore))
        # The second met the first row locked, and the third asked again and found both done.
        assert_run(first, processed=1, stale=1)
        assert_run(second, processed=1, skipped=1)
        assert_run(third, stale=2)

    @pytest.mark.parametrize("make", [transactional, spanning, at_most_once])
    def test_a_missing_second_check_is_caught(
        make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seams.replace(monkeypatch, seams.SUITS, lambda *_: False)
        without = lambda question, pks: question.table.filter(pk__in=pks)  # noqa: E731
        seams.replace(monkeypatch, seams.AMONG, without)
        errands(3)
        handled: list[int] = []
        with pytest.raises(AssertionError, match=r"by one worker, got row \d+ handled by worker "):
            race(make(lambda row: handled.append(row.pk)))
        # The second handler was not called any more.
        assert len(handled) == len(set(handled))

    @pytest.mark.parametrize("make", [transactional, spanning])
    def test_a_missing_lock_is_caught(
        make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seams.replace(monkeypatch, seams.SUITS, lambda *_: False)
        seams.replace(monkeypatch, seams.LOCKING, lambda rows: rows)
        errands(3)
        with pytest.raises(AssertionError, match=r"got row \d+ handled by worker \d, which had"):
            race(make(ignore))

    def test_what_a_handler_asserts_reaches_the_test_with_its_traceback() -> None:
        errands(3)

        def handle(row: Errand) -> None:
            assert row.place != 1, "wrong place"

        for make in (transactional, at_least_once):
            with pytest.raises(AssertionError, match="wrong place") as caught:
                race(make(handle))
            frames = traceback.extract_tb(caught.value.__traceback__)
            assert any(frame.name == "handle" for frame in frames)

    def test_a_row_that_fails_is_tried_by_each_worker_and_is_no_double() -> None:
        errands(1)
        reports = race(transactional(raising(ValueError("bad"))))
        assert [report.failed for report in reports] == [1, 0, 1]
        with pytest.raises(RowsFailed):
            reports[0].raise_for_failures()

    def test_a_race_for_nothing_is_refused() -> None:
        with pytest.raises(AssertionError, match="expected pending rows to race for, got none"):
            race(transactional(ignore))

    def test_a_race_that_goes_on_for_too_long_fails(monkeypatch: pytest.MonkeyPatch) -> None:
        seams.replace(monkeypatch, seams.RACE_TIMEOUT, 0.2)
        errands(1)
        over = threading.Event()
        try:
            with pytest.raises(AssertionError, match=r"expected the race to end within 0\.2 s"):
                race(transactional(lambda row: over.wait(30)))
        finally:
            over.set()
            for each in threading.enumerate():
                if "work" in each.name and each.daemon:
                    each.join(30)

    class InTestCase(TestCase):
        def test_it_is_refused(self) -> None:
            errands(1)
            with pytest.raises(Unsupported, match="use TransactionTestCase"):
                race(transactional(ignore))
            with transaction.atomic(), pytest.raises(Unsupported, match="TestCase"):
                race(transactional(ignore))
