from __future__ import annotations

import logging
from datetime import timedelta

from django.db import transaction
from django.db.models import Exists, OuterRef, Q
from django.utils import timezone

from tests.ported import outside
from tests.ported.models import Account, Item, Part

logger = logging.getLogger(__name__)


def pack() -> None:
    for pk in Item.objects.filter(state="new").values_list("pk", flat=True):
        try:
            with transaction.atomic():
                free = Item.objects.select_for_update(skip_locked=True)
                item = free.filter(pk=pk, state="new").first()
                if item is not None:
                    outside.perform(f"pack {item.name}")
                    free.filter(pk=pk).update(state="packed")
        except ValueError:
            logger.exception("item %s failed", pk)


def send() -> None:
    for pk in Item.objects.filter(state="packed").values_list("pk", flat=True):
        try:
            with transaction.atomic():
                free = Item.objects.select_for_update(skip_locked=True)
                item = free.filter(pk=pk, state="packed").first()
                if item is not None:
                    outside.perform(f"send {item.name}")
                    free.filter(pk=pk).update(state="sent")
        except ValueError:
            logger.exception("item %s failed", pk)


def stages() -> None:
    pack()
    send()


def depends() -> None:
    ready = Item.objects.filter(Q(parent=None) | Q(parent__state="done"), state="new")
    for pk in ready.order_by("pk").values_list("pk", flat=True):
        try:
            with transaction.atomic():
                free = ready.select_for_update(skip_locked=True, of=("self",))
                item = free.filter(pk=pk).first()
                if item is not None:
                    outside.perform(item.name)
                    Item.objects.filter(pk=pk).update(state="done")
        except ValueError:
            logger.exception("item %s failed", pk)


def after_all_children() -> None:
    unfinished = Item.objects.filter(parent=OuterRef("pk")).exclude(state="done")
    ready = Item.objects.filter(~Exists(unfinished), state="waiting")
    for pk in ready.values_list("pk", flat=True):
        try:
            with transaction.atomic():
                item = ready.select_for_update(skip_locked=True).filter(pk=pk).first()
                if item is not None:
                    outside.perform(item.name)
                    Item.objects.filter(pk=pk).update(state="complete")
        except ValueError:
            logger.exception("item %s failed", pk)


def bury() -> None:
    with transaction.atomic():
        failed = Item.objects.select_for_update(skip_locked=True).filter(state="failed")
        for item in failed:
            Part.objects.create(text=item.name)
            item.delete()


def lock_related() -> None:
    with transaction.atomic():
        new = Item.objects.select_for_update(skip_locked=True).filter(state="new")
        for item in new.order_by("owner"):
            account = Account.objects.select_for_update(no_key=True).get(pk=item.owner_id)
            account.balance += item.amount
            account.save(update_fields=["balance"])
            item.state = "done"
            item.save(update_fields=["state"])


def related_is_busy() -> None:
    due = Q(next_attempt_at=None) | Q(next_attempt_at__lte=timezone.now())
    with transaction.atomic():
        new = Item.objects.select_for_update(skip_locked=True).filter(due, state="new")
        for item in new:
            accounts = Account.objects.select_for_update(skip_locked=True)
            account = accounts.filter(pk=item.owner_id).first()
            if account is None:
                item.next_attempt_at = timezone.now() + timedelta(minutes=1)
            else:
                account.balance += item.amount
                account.save(update_fields=["balance"])
                item.state = "done"
            item.save(update_fields=["state", "next_attempt_at"])
