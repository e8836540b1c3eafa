from __future__ import annotations

from django.db.models import Exists, OuterRef, Q

from dcl_processor import Retry, Snooze, batch_processor
from tests.ported import outside
from tests.ported.models import Account, Item, Part


@batch_processor(pending=lambda: Item.objects.filter(state="new"), done={"state": "packed"})
def pack(item: Item) -> None:
    outside.perform(f"pack {item.name}")


@batch_processor(pending=lambda: Item.objects.filter(state="packed"), done={"state": "sent"})
def send(item: Item) -> None:
    outside.perform(f"send {item.name}")


def stages() -> None:
    pack()
    send()


@batch_processor(
    pending=lambda: Item.objects.filter(
        Q(parent=None) | Q(parent__state="done"), state="new"
    ).order_by("pk"),
    done={"state": "done"},
)
def depends(item: Item) -> None:
    outside.perform(item.name)


@batch_processor(
    pending=lambda: Item.objects.filter(
        ~Exists(Item.objects.filter(parent=OuterRef("pk")).exclude(state="done")), state="waiting"
    ),
    done={"state": "complete"},
)
def after_all_children(item: Item) -> None:
    outside.perform(item.name)


@batch_processor(pending=lambda: Item.objects.filter(state="failed"))
def bury(item: Item) -> None:
    Part.objects.create(text=item.name)
    item.delete()


@batch_processor(pending=lambda: Item.objects.filter(state="new"), done={"state": "done"})
def lock_related(item: Item) -> None:
    account = Account.objects.select_for_update(no_key=True).get(pk=item.owner_id)
    account.balance += item.amount
    account.save(update_fields=["balance"])


@batch_processor(
    pending=lambda: Item.objects.filter(state="new"), done={"state": "done"}, retry=Retry()
)
def related_is_busy(item: Item) -> None:
    accounts = Account.objects.select_for_update(skip_locked=True)
    account = accounts.filter(pk=item.owner_id).first()
    if account is None:
        raise Snooze("the account is locked", delay=60)
    account.balance += item.amount
    account.save(update_fields=["balance"])
