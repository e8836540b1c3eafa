from __future__ import annotations

import logging
from datetime import timedelta

from django.db import transaction
from django.db.models import F, Q
from django.utils import timezone

from tests.ported import outside
from tests.ported.models import Item

logger = logging.getLogger(__name__)
LEASE = timedelta(minutes=1)


def lock_each() -> None:
    for pk in Item.objects.filter(state="new").values_list("pk", flat=True):
        try:
            with transaction.atomic():
                free = Item.objects.select_for_update(skip_locked=True)
                item = free.filter(pk=pk, state="new").first()
                if item is not None:
                    outside.perform(item.name)
                    free.filter(pk=pk).update(state="done")
        except ValueError:
            logger.exception("item %s failed", pk)


def lock_many() -> None:
    with transaction.atomic():
        new = Item.objects.select_for_update(skip_locked=True).filter(state="new")
        for item in new[:100]:
            try:
                with transaction.atomic():
                    outside.perform(item.name)
                    Item.objects.filter(pk=item.pk).update(state="done")
            except ValueError:
                logger.exception("item %s failed", item.pk)


def mark_running() -> None:
    lapsed = Q(state="running", started_at__lt=timezone.now() - LEASE)
    Item.objects.filter(lapsed).update(state="new")
    while True:
        with transaction.atomic():
            new = Item.objects.select_for_update(skip_locked=True).filter(state="new")
            item = new.first()
            if item is None:
                return
            item.state, item.started_at = "running", timezone.now()
            item.save(update_fields=["state", "started_at"])
        try:
            outside.perform(item.name)
            item.state = "done"
        except ValueError:
            item.state = "failed"
        item.save(update_fields=["state"])


def mark_worker() -> None:
    lapsed = Q(state="running", started_at__lt=timezone.now() - LEASE)
    Item.objects.filter(lapsed).update(state="new", worker="")
    while True:
        with transaction.atomic():
            new = Item.objects.select_for_update(skip_locked=True).filter(state="new")
            item = new.first()
            if item is None:
                return
            item.state, item.started_at = "running", timezone.now()
            item.worker = outside.worker()
            item.save(update_fields=["state", "started_at", "worker"])
        try:
            outside.perform(item.name)
            item.state = "done"
        except ValueError:
            item.state, item.worker = "failed", ""
        item.started_at = None
        item.save(update_fields=["state", "started_at", "worker"])


def never_again() -> None:
    while True:
        with transaction.atomic():
            new = Item.objects.select_for_update(skip_locked=True).filter(state="new")
            item = new.first()
            if item is None:
                return
            item.state, item.started_at = "running", timezone.now()
            item.save(update_fields=["state", "started_at"])
        try:
            outside.perform(item.name)
            Item.objects.filter(pk=item.pk).update(state="done")
        except ValueError:
            logger.exception("item %s failed", item.pk)


def flag_first() -> None:
    with transaction.atomic():
        new = Item.objects.select_for_update(skip_locked=True).filter(state="new")
        items = list(new)
        Item.objects.filter(pk__in=[item.pk for item in items]).update(state="done")
    for item in items:
        try:
            outside.perform(item.name)
        except ValueError:
            logger.exception("item %s failed", item.pk)


def lease() -> None:
    now = timezone.now()
    free = Q(leased_until=None) | Q(leased_until__lt=now)
    with transaction.atomic():
        new = Item.objects.select_for_update(skip_locked=True).filter(free, state="new")
        items = list(new)
        leased = Item.objects.filter(pk__in=[item.pk for item in items])
        leased.update(leased_until=now + LEASE)
    for item in items:
        try:
            outside.perform(item.name)
            Item.objects.filter(pk=item.pk).update(state="done", leased_until=None)
        except ValueError:
            Item.objects.filter(pk=item.pk).update(leased_until=None)


def lease_in_due_at() -> None:
    now = timezone.now()
    free = Q(due_at=None) | Q(due_at__lt=now)
    with transaction.atomic():
        new = Item.objects.select_for_update(skip_locked=True).filter(free, state="new")
        items = list(new)
        leased = Item.objects.filter(pk__in=[item.pk for item in items])
        leased.update(due_at=now + LEASE)
    for item in items:
        try:
            outside.perform(item.name)
            Item.objects.filter(pk=item.pk).update(state="done", due_at=None)
        except ValueError:
            Item.objects.filter(pk=item.pk).update(due_at=None)


def delete_after_work() -> None:
    for pk in Item.objects.values_list("pk", flat=True):
        try:
            with transaction.atomic():
                item = Item.objects.select_for_update(skip_locked=True).filter(pk=pk).first()
                if item is not None:
                    outside.perform(item.name)
                    item.delete()
        except ValueError:
            logger.exception("item %s failed", pk)


def one_by_id() -> None:
    pk = Item.objects.get(name="a").pk
    try:
        with transaction.atomic():
            free = Item.objects.select_for_update(skip_locked=True)
            item = free.filter(pk=pk, state="new").first()
            if item is not None:
                outside.perform(item.name)
                free.filter(pk=pk).update(state="done")
    except ValueError:
        logger.exception("item %s failed", pk)


def put_back() -> None:
    lapsed = Q(state="running", started_at__lt=timezone.now() - LEASE)
    Item.objects.filter(lapsed).update(state="new", started_at=None)
    while True:
        with transaction.atomic():
            new = Item.objects.select_for_update(skip_locked=True).filter(state="new")
            item = new.first()
            if item is None:
                return
            item.state, item.started_at = "running", timezone.now()
            item.save(update_fields=["state", "started_at"])
        try:
            outside.perform(item.name)
            Item.objects.filter(pk=item.pk).update(state="done")
        except ValueError:
            logger.exception("item %s failed", item.pk)


def unknown_after_death() -> None:
    now = timezone.now()
    with transaction.atomic():
        lapsed = Item.objects.filter(state="new", leased_until__lt=now)
        lapsed.update(state="unknown", leased_until=None)
        new = Item.objects.select_for_update(skip_locked=True).filter(state="new")
        items = list(new.filter(leased_until=None))
        leased = Item.objects.filter(pk__in=[item.pk for item in items])
        leased.update(leased_until=now + LEASE)
    for item in items:
        try:
            outside.perform(item.name)
            state = "done"
        except ValueError:
            state = "unknown"
        Item.objects.filter(pk=item.pk).update(state=state, leased_until=None)


def progress() -> None:
    now = timezone.now()
    free = Q(leased_until=None) | Q(leased_until__lt=now)
    with transaction.atomic():
        new = Item.objects.select_for_update(skip_locked=True).filter(free, state="new")
        items = list(new)
        leased = Item.objects.filter(pk__in=[item.pk for item in items])
        leased.update(leased_until=now + LEASE)
    for item in items:
        try:
            for percent in (50, 100):
                outside.perform(f"{item.name} {percent}")
                Item.objects.filter(pk=item.pk).update(amount=F("amount") + 50)
            Item.objects.filter(pk=item.pk).update(state="done", leased_until=None)
        except ValueError:
            Item.objects.filter(pk=item.pk).update(leased_until=None)
