from __future__ import annotations

from collections.abc import Sequence

from django.db.models import Q, QuerySet

from dcl_processor import BatchProcessor, Delivery, Lease, Retry, batch_processor
from tests.ported import outside
from tests.ported.models import Account, Item


class Digest(BatchProcessor[Item]):
    done = {"state": "done"}
    group_by = "kind"

    def pending(self) -> QuerySet[Item]:
        return Item.objects.filter(state="new")

    def process_batch(self, items: Sequence[Item], /) -> None:
        outside.push(items[0].kind, [item.name for item in items])


digest = Digest()


@batch_processor(
    pending=lambda: Account.objects.filter(items__state="new").distinct(), repeats=True
)
def over_parents(account: Account) -> None:
    items = list(account.items.filter(state="new").order_by("pk"))
    outside.push(account.pk, [item.name for item in items])
    Item.objects.filter(pk__in=[item.pk for item in items]).update(state="done")


@batch_processor(
    pending=lambda: Item.objects.filter(state="new").order_by("pk"),
    done={"state": "done"},
    failed={"state": "failed"},
    retry=Retry(2),
    group_by="kind",
    in_order=True,
)
def in_order(item: Item) -> None:
    outside.perform(item.name)


@batch_processor(
    pending=lambda: Item.objects.filter(state="new"), done={"state": "done"}, group_by="kind"
)
def one_at_a_time(item: Item) -> None:
    outside.perform(item.name)


@batch_processor(
    pending=lambda: Item.objects.filter(state="new"),
    done={"state": "done"},
    delivery=Delivery.AT_LEAST_ONCE,
    lease=Lease(60),
    group_by="kind",
    max_per_group=2,
)
def capped(item: Item) -> None:
    outside.perform(item.name)


@batch_processor(
    pending=lambda: Item.objects.filter(state="new", owner__closed=False), done={"state": "done"}
)
def state_of_parent(item: Item) -> None:
    outside.perform(item.name)


@batch_processor(pending=lambda: Item.objects.filter(state="new"), done={"state": "done"})
def of_a_tenant(item: Item) -> None:
    outside.perform(item.name)


def in_turn() -> None:
    for account in Account.objects.all():
        of_a_tenant(filter=Q(owner=account), limit=1)
