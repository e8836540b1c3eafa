"""``race()``: a right processor passes, and a broken one is caught each time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import transaction

from dcl_processor import BatchProcessor
from dcl_processor.exceptions import Unsupported
from dcl_processor.testing import race
from tests import seams
from tests.contract.support import errands as the
from tests.contract.support.gate import HAS_ROW_LOCKS
from tests.contract.support.reports import assert_run
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


def spanning(handler: Callable[..., Any], **options: Any) -> BatchProcessor[Errand]:
    """Ask in two statements: what comes through a subquery cannot be asked with the lock."""
    asked = Errand.objects.filter(pk__in=the.PENDING.values("pk"))
    return the.transactional(handler, pending=asked, **options)


async def touch(row: Errand) -> None:
    """Handle a row on the event loop, with a look into the database."""
    assert await sync_to_async(Errand.objects.filter(pk=row.pk).exists)()


RIGHT: dict[str, Callable[[], BatchProcessor[Any]]] = {
    "spanning": lambda: spanning(the.ignore),
    "process_batch": lambda: the.transactional(the.ignore, process_batch=the.ignore, batch_size=2),
    "at most once": lambda: the.at_most_once(the.ignore),
    "at least once": lambda: the.at_least_once(the.ignore, retry=the.retry()),
    "async": lambda: the.at_least_once(touch),
}


if not HAS_ROW_LOCKS:

    def test_a_database_without_row_locks_is_refused() -> None:
        the.errands(1)
        with pytest.raises(Unsupported, match=r"locks single rows, .* got SQLite"):
            race(the.transactional(the.ignore))


if HAS_ROW_LOCKS:

    @pytest.mark.parametrize("make", RIGHT.values(), ids=RIGHT)
    def test_a_right_processor_passes(make: Callable[[], Any]) -> None:
        the.errands(5)
        reports = race(make())
        assert sum(report.raise_for_failures().processed for report in reports) == 5
        assert not the.PENDING.all().exists()

    def test_the_workers_meet_at_a_row_that_is_locked_and_at_one_that_is_finished() -> None:
        the.errands(2)
        first, second = race(the.transactional(the.ignore))
        assert_run(first, processed=1, stale=1)
        assert_run(second, processed=1, skipped=1)

    @pytest.mark.parametrize("make", [the.transactional, spanning])
    @pytest.mark.parametrize(
        ("seam", "without", "number"),
        [
            (seams.AMONG, lambda question, pks: question.table.filter(pk__in=pks), 2),
            (seams.LOCKING, lambda rows: rows, 1),
        ],
        ids=["second check", "lock"],
    )
    def test_what_is_missing_is_caught(
        make: Any, seam: seams.Seam, without: Any, number: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seams.replace(monkeypatch, seams.SUITS, lambda *_: False)
        seams.replace(monkeypatch, seam, without)
        row = the.errands(number)[-1]
        with pytest.raises(AssertionError, match=f"one worker, got both for row {row.pk}"):
            race(make(the.ignore))

    def test_a_race_for_nothing_is_refused() -> None:
        with pytest.raises(AssertionError, match="expected pending rows, got none"):
            race(the.transactional(the.ignore))

    def test_rows_that_are_not_committed_are_refused() -> None:
        with transaction.atomic(), pytest.raises(Unsupported, match="use TransactionTestCase"):
            race(the.transactional(the.ignore))
