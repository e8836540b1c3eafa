"""The processors that the command runs: one for each delivery, with a batch of one row."""

from __future__ import annotations

from django.db.models import QuerySet

from dcl_processor import BatchProcessor, Delivery, Lease
from tests.benchmarks import handling
from tests.models import Errand


class Errands(BatchProcessor[Errand]):
    done = {"done": True}

    def pending(self) -> QuerySet[Errand]:
        return Errand.objects.filter(done=False)

    def process(self, row: Errand) -> None:
        handling.handle(row.pk)


transactional = Errands(name="benchmarks.transactional")
at_most_once = Errands(name="benchmarks.at_most_once", delivery=Delivery.AT_MOST_ONCE)
at_least_once = Errands(
    name="benchmarks.at_least_once", delivery=Delivery.AT_LEAST_ONCE, lease=Lease(60)
)
