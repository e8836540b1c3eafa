from __future__ import annotations

import logging
from datetime import timedelta

from django.db import transaction
from django.db.models import F, Q
from django.utils import timezone

from tests.ported import outside
from tests.ported.models import Item

logger = logging.getLogger(__name__)


def next_time() -> None:
    now = timezone.now()
    for pk in Item.objects.filter(due_at__lte=now).values_list("pk", flat=True):
        try:
            with transaction.atomic():
                free = Item.objects.select_for_update(skip_locked=True)
                item = free.filter(pk=pk, due_at__lte=now).first()
                if item is not None:
                    outside.perform(item.name)
                    free.filter(pk=pk).update(due_at=now + timedelta(hours=1))
        except ValueError:
            logger.exception("item %s failed", pk)


def each_run() -> None:
    for pk in Item.objects.values_list("pk", flat=True):
        try:
            with transaction.atomic():
                item = Item.objects.select_for_update(skip_locked=True).filter(pk=pk).first()
                if item is not None:
                    outside.perform(item.name)
        except ValueError:
            logger.exception("item %s failed", pk)


def longest_ago() -> None:
    for pk in Item.objects.order_by("amount", "pk").values_list("pk", flat=True)[:2]:
        try:
            with transaction.atomic():
                item = Item.objects.select_for_update(skip_locked=True).filter(pk=pk).first()
                if item is not None:
                    outside.perform(item.name)
                    item.amount = F("amount") + 1
                    item.save(update_fields=["amount"])
        except ValueError:
            logger.exception("item %s failed", pk)


def steps() -> None:
    for pk in Item.objects.filter(amount__lt=3).values_list("pk", flat=True):
        try:
            with transaction.atomic():
                free = Item.objects.select_for_update(skip_locked=True)
                item = free.filter(pk=pk, amount__lt=3).first()
                if item is not None:
                    outside.perform(f"{item.name} {item.amount}")
                    free.filter(pk=pk).update(amount=F("amount") + 1)
        except ValueError:
            logger.exception("item %s failed", pk)


def too_old() -> None:
    now = timezone.now()
    old = Q(finished_at=None) | Q(finished_at__lt=now - timedelta(days=30))
    for pk in Item.objects.filter(old).values_list("pk", flat=True):
        try:
            with transaction.atomic():
                free = Item.objects.select_for_update(skip_locked=True)
                item = free.filter(old, pk=pk).first()
                if item is not None:
                    outside.perform(item.name)
                    free.filter(pk=pk).update(finished_at=now)
        except ValueError:
            logger.exception("item %s failed", pk)


def changed_again() -> None:
    now = timezone.now()
    free = Q(leased_until=None) | Q(leased_until__lt=now)
    with transaction.atomic():
        changed = Item.objects.filter(free, amount__lt=F("priority"))
        items = list(changed.select_for_update(skip_locked=True))
        leased = Item.objects.filter(pk__in=[item.pk for item in items])
        leased.update(leased_until=now + timedelta(minutes=1))
    for item in items:
        try:
            outside.perform(item.name)
            Item.objects.filter(pk=item.pk).update(amount=item.priority, leased_until=None)
        except ValueError:
            Item.objects.filter(pk=item.pk).update(leased_until=None)
