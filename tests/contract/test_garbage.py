"""What a row leaves behind is freed at once: no circle of objects waits for the collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from dcl_processor import BatchProcessor, Delivery, Lease, Retry, batch_processor
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True)

PENDING = Errand.objects.filter(done=False, dead=False, claimed=False)
SPANNING = PENDING.filter(pk__in=Errand.objects.filter(done=False).values("pk"))
AT_LEAST = {"delivery": Delivery.AT_LEAST_ONCE, "lease": Lease(60)}
AT_MOST = {"delivery": Delivery.AT_MOST_ONCE}


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    gc.disable()
    gc.collect()
    # What is there already is not looked through again.
    gc.freeze()
    yield
    gc.unfreeze()
    gc.enable()


def left_by(processor: BatchProcessor[Errand], rows: int) -> int:
    """Return how many objects a run over so many rows leaves to the collector."""
    Errand.objects.bulk_create(Errand(place=place) for place in range(rows))
    gc.collect()
    report = processor.run()
    assert report.processed + report.failed == rows
    return gc.collect()


def handle(row: Errand) -> None:
    """Handle a row by a look at the database."""
    Errand.objects.filter(pk=row.pk).exists()


def refuse(row: Errand) -> None:
    raise LookupError(row.pk)


@pytest.mark.parametrize("handler", [handle, refuse])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pending": SPANNING},
        {"batch_size": 10},
        {"retry": Retry(max_attempts=1), "failed": {"dead": True}},
        {"claim": {"claimed": True}, "claimed_at": "claimed_at", **AT_MOST},
        AT_MOST,
        AT_LEAST,
        {"retry": Retry(max_attempts=1), "failed": {"dead": True}, **AT_LEAST},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_no_row_leaves_a_circle(options: dict[str, Any], handler: Any) -> None:
    options = {"pending": PENDING, "done": {"done": True}, **options}
    run = batch_processor(max_consecutive_failures=0, **options)(handler)
    left_by(run, 10)  # what is made once
    Errand.objects.all().delete()
    few = left_by(run, 10)
    Errand.objects.all().delete()
    assert left_by(run, 60) - few < 50, "not one object for each of 50 rows more"
