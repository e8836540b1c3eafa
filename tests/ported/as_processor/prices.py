from __future__ import annotations

from collections.abc import Sequence

from django.db.models import QuerySet

from dcl_processor import BatchProcessor, Delivery, Lease, Retry
from tests.ported import outside
from tests.ported.models import Price


class PushPrices(BatchProcessor[Price]):
    done = {"state": "shown"}
    failed = {"state": "refused"}
    delivery = Delivery.AT_LEAST_ONCE
    lease = Lease(300)
    retry = Retry(3, backoff=60)
    batch_size = 100

    def pending(self) -> QuerySet[Price]:
        return Price.objects.filter(state="new")

    def process_batch(self, rows: Sequence[Price], /) -> list[ValueError | None]:
        answers = outside.mutate([(row.sku, row.amount) for row in rows])
        return [None if refusal is None else ValueError(refusal) for refusal in answers]


push_prices = PushPrices()
