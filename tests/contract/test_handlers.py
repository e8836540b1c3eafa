"""What a handler may do to its row, its transaction and its run."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import models

from dcl_processor import BatchProcessor
from dcl_processor.exceptions import StillPending, Unsupported
from tests.contract.support import errands as the
from tests.contract.support.parcels import parcels, processor
from tests.contract.support.reports import assert_run
from tests.models import Errand, Parcel

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


@the.all_deliveries
def test_a_handler_that_deletes_its_row_has_processed_it(make: the.Make) -> None:
    the.errands(2)
    assert_run(make(lambda row: row.delete())(), processed=2)
    assert not Errand.objects.exists()


def test_a_handler_that_leaves_its_row_pending_is_found_out_at_the_second_row() -> None:
    parcels(5)
    calls: list[int] = []
    report = processor(lambda row: calls.append(row.pk), done=None)()
    assert_run(report, failed=2, stopped="failures")
    assert len(calls) == 2
    assert {type(failure.error) for failure in report.failures} == {StillPending}
    assert not report.ok


def test_i11_an_edit_that_came_between_read_and_lock_is_not_overwritten() -> None:
    """The flip is not a save(): it knows nothing of the columns it does not name."""
    parcels(2)
    seen: list[str] = []

    def handle(row: Parcel) -> None:
        if row.priority == 0:
            later = Parcel.objects.using("default").filter(priority=1)
            later.update(note="edited meanwhile")
        seen.append(row.note)

    assert_run(processor(handle)(), processed=2)
    assert seen == ["", "edited meanwhile"]
    assert Parcel.objects.get(priority=1).note == "edited meanwhile"


# --- a handler that runs processors


@the.each_delivery
@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_run_inside_a_run_of_the_same_processor_is_refused(make: Any, concurrency: int) -> None:
    the.errands(20)
    calls: list[int] = []

    def handle(row: Errand) -> None:
        calls.append(row.place)
        with pytest.raises(Unsupported, match="expected the handler not to run its own processor"):
            run()

    run: BatchProcessor[Errand] = make(handle)
    assert_run(run(concurrency=concurrency), processed=20)
    assert sorted(calls) == list(range(20))
    assert_run(run())  # and it does not count as running after its end


def test_an_event_loop_is_refused_where_threads_are_greenlets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    the.errands(2)
    calls: list[int] = []

    async def handle(row: Errand) -> None:
        calls.append(row.place)

    stand_in = SimpleNamespace(is_module_patched=lambda name: name == "threading")
    monkeypatch.setitem(sys.modules, "gevent.monkey", stand_in)
    with pytest.raises(Unsupported, match="patched by gevent; write"):
        the.at_least_once(handle)()
    assert calls == []
    assert_run(the.at_least_once(the.ignore)(concurrency=2), processed=2)


@the.all_deliveries
@the.each_size
def test_a_row_that_its_handler_moves_to_another_key_has_failed(make: Any, size: int) -> None:
    """It would be processed under the one key, and pending under the other."""
    pks = [row.pk for row in the.errands(3)]

    def move(row: Errand) -> None:
        if row.place == 1:
            Errand.objects.filter(pk=row.pk).delete()
            row.pk = Errand.objects.create(pk=row.pk + 1000, place=row.place).pk

    report = make(move, batch_size=size)(filter=models.Q(pk__in=pks))
    assert_run(report, processed=2, failed=1)
    [failure] = report.failures
    assert f"got row {pks[1]} with the key {pks[1] + 1000}" in str(failure.error)
    # The default delivery takes the row's work back.
    assert Errand.objects.filter(pk=pks[1]).exists() is (make is the.transactional)
