from __future__ import annotations

import asyncio
from collections.abc import Sequence

from django.db.models import QuerySet

from dcl_processor import BatchProcessor, Delivery, Lease, batch_processor
from tests.ported import outside
from tests.ported.models import Item, Part


class BulkCall(BatchProcessor[Item]):
    done = {"state": "done"}
    batch_size = 100

    def pending(self) -> QuerySet[Item]:
        return Item.objects.filter(state="new")

    def process_batch(self, items: Sequence[Item], /) -> None:
        outside.push("all", [item.name for item in items])


bulk_call = BulkCall()


class BulkResults(BatchProcessor[Item]):
    done = {"state": "done"}
    failed = {"state": "refused"}
    delivery = Delivery.AT_LEAST_ONCE
    lease = Lease(60)
    batch_size = 100

    def pending(self) -> QuerySet[Item]:
        return Item.objects.filter(state="new")

    def process_batch(self, items: Sequence[Item], /) -> list[ValueError | None]:
        answers = outside.mutate([(item.name, item.amount) for item in items])
        return [ValueError(answer) if answer else None for answer in answers]


bulk_results = BulkResults()


class BulkValues(BatchProcessor[Item]):
    batch_size = 100

    def pending(self) -> QuerySet[Item]:
        return Item.objects.filter(state="new")

    def process_batch(self, items: Sequence[Item], /) -> list[str]:
        return [outside.ask(item.name) for item in items]

    def get_done(self, item: Item, answer: str, /) -> dict[str, str]:
        return {"state": "done", "result": answer}


bulk_values = BulkValues()


class BulkChildren(BatchProcessor[Item]):
    done = {"state": "done"}
    batch_size = 100

    def pending(self) -> QuerySet[Item]:
        return Item.objects.filter(state="new")

    def process_batch(self, items: Sequence[Item], /) -> None:
        Part.objects.bulk_create([Part(item=item, text="from work") for item in items])


bulk_children = BulkChildren()


@batch_processor(
    pending=lambda: Item.objects.filter(state="new"),
    done={"state": "done"},
    resource=outside.connect,
)
def one_connection(item: Item, connection: str) -> None:
    outside.perform(f"{item.name} {connection}")


@batch_processor(
    pending=lambda: Item.objects.filter(state="new"),
    done={"state": "done"},
    delivery=Delivery.AT_LEAST_ONCE,
    lease=Lease(60),
    concurrency=4,
)
def threads(item: Item) -> None:
    outside.perform(item.name)


@batch_processor(
    pending=lambda: Item.objects.filter(state="new"),
    done={"state": "done"},
    delivery=Delivery.AT_LEAST_ONCE,
    lease=Lease(60),
    concurrency=4,
)
async def coroutines(item: Item) -> None:
    await asyncio.sleep(0)
    outside.perform(item.name)
