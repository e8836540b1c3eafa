from __future__ import annotations

from django.db.models import F, Q

from dcl_processor import Delivery, Discard, Lease, batch_processor, worker_name
from tests.ported import outside
from tests.ported.models import Item


@batch_processor(pending=lambda: Item.objects.filter(state="new"), done={"state": "done"})
def lock_each(item: Item) -> None:
    outside.perform(item.name)


@batch_processor(
    pending=lambda: Item.objects.filter(state="new"), done={"state": "done"}, batch_size=100
)
def lock_many(item: Item) -> None:
    outside.perform(item.name)


@batch_processor(
    pending=lambda: Item.objects.filter(
        Q(state="new") | Q(state="running", leased_until__isnull=False)
    ),
    done={"state": "done"},
    failed={"state": "failed"},
    delivery=Delivery.AT_LEAST_ONCE,
    lease=Lease(60),
    claim={"state": "running"},
    reset={"state": "new"},
)
def mark_running(item: Item) -> None:
    outside.perform(item.name)


@batch_processor(
    pending=lambda: Item.objects.filter(
        Q(state="new") | Q(state="running", leased_until__isnull=False)
    ),
    done={"state": "done"},
    failed={"state": "failed"},
    delivery=Delivery.AT_LEAST_ONCE,
    lease=Lease(60),
    claim={"state": "running", "worker": worker_name},
    claimed_at="started_at",
    reset={"state": "new", "worker": ""},
)
def mark_worker(item: Item) -> None:
    outside.perform(item.name)


@batch_processor(
    pending=lambda: Item.objects.filter(state="new"),
    done={"state": "done"},
    delivery=Delivery.AT_MOST_ONCE,
    claim={"state": "running"},
    claimed_at="started_at",
)
def never_again(item: Item) -> None:
    outside.perform(item.name)


@batch_processor(
    pending=lambda: Item.objects.filter(state="new"),
    done={"state": "done"},
    delivery=Delivery.AT_MOST_ONCE,
)
def flag_first(item: Item) -> None:
    outside.perform(item.name)


@batch_processor(
    pending=lambda: Item.objects.filter(state="new"),
    done={"state": "done"},
    delivery=Delivery.AT_LEAST_ONCE,
    lease=Lease(60),
)
def lease(item: Item) -> None:
    outside.perform(item.name)


@batch_processor(
    pending=lambda: Item.objects.filter(state="new"),
    done={"state": "done"},
    delivery=Delivery.AT_LEAST_ONCE,
    lease=Lease(60, field="due_at"),
)
def lease_in_due_at(item: Item) -> None:
    outside.perform(item.name)


@batch_processor(pending=Item.objects.all)
def delete_after_work(item: Item) -> None:
    outside.perform(item.name)
    item.delete()


@batch_processor(pending=lambda: Item.objects.filter(state="new"), done={"state": "done"})
def any_item(item: Item) -> None:
    outside.perform(item.name)


def one_by_id() -> None:
    any_item(filter=Q(pk=Item.objects.get(name="a").pk))


@batch_processor(
    pending=lambda: Item.objects.filter(state="new"),
    done={"state": "done"},
    delivery=Delivery.AT_MOST_ONCE,
    claim={"state": "running"},
    claimed_at="started_at",
    reset={"state": "new"},
)
def swept(item: Item) -> None:
    outside.perform(item.name)


def put_back() -> None:
    swept.requeue(swept.in_doubt(older_than=60))
    swept()


def worker_died(item: Item) -> None:
    raise Discard("its worker died")


@batch_processor(
    pending=lambda: Item.objects.filter(state="new"),
    done={"state": "done"},
    failed={"state": "unknown"},
    delivery=Delivery.AT_LEAST_ONCE,
    lease=Lease(60),
    taken_over=worker_died,
)
def unknown_after_death(item: Item) -> None:
    outside.perform(item.name)


@batch_processor(
    pending=lambda: Item.objects.filter(state="new"),
    done={"state": "done"},
    delivery=Delivery.AT_LEAST_ONCE,
    lease=Lease(60),
)
def progress(item: Item) -> None:
    for percent in (50, 100):
        outside.perform(f"{item.name} {percent}")
        Item.objects.filter(pk=item.pk).update(amount=F("amount") + 50)
