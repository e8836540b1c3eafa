from __future__ import annotations

from datetime import timedelta

from django.db.models import F, Q
from django.db.models.functions import Now

from dcl_processor import Delivery, Lease, batch_processor
from tests.ported import outside
from tests.ported.models import Item


@batch_processor(
    pending=lambda: Item.objects.filter(due_at__lte=Now()),
    done={"due_at": Now() + timedelta(hours=1)},
)
def next_time(item: Item) -> None:
    outside.perform(item.name)


@batch_processor(pending=Item.objects.all, repeats=True)
def each_run(item: Item) -> None:
    outside.perform(item.name)


@batch_processor(
    pending=lambda: Item.objects.order_by("amount", "pk"),
    done={"amount": F("amount") + 1},
    strict_order=True,
    repeats=True,
)
def round_robin(item: Item) -> None:
    outside.perform(item.name)


def longest_ago() -> None:
    round_robin(limit=2)


@batch_processor(
    pending=lambda: Item.objects.filter(amount__lt=3),
    done={"amount": F("amount") + 1},
    repeats=True,
)
def steps(item: Item) -> None:
    outside.perform(f"{item.name} {item.amount}")


@batch_processor(
    pending=lambda: Item.objects.filter(
        Q(finished_at=None) | Q(finished_at__lt=Now() - timedelta(days=30))
    ),
    done={"finished_at": Now()},
)
def too_old(item: Item) -> None:
    outside.perform(item.name)


@batch_processor(
    pending=lambda: Item.objects.filter(amount__lt=F("priority")),
    done=lambda item: {"amount": item.priority},
    delivery=Delivery.AT_LEAST_ONCE,
    lease=Lease(60),
    repeats=True,
)
def changed_again(item: Item) -> None:
    outside.perform(item.name)
