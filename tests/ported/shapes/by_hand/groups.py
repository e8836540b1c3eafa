from __future__ import annotations

import logging
from collections import Counter, defaultdict
from datetime import timedelta

from django.db import connection, transaction
from django.db.models import Exists, OuterRef, Q
from django.utils import timezone

from tests.ported import outside
from tests.ported.models import Account, Item

logger = logging.getLogger(__name__)


def digest() -> None:
    with transaction.atomic():
        new = Item.objects.select_for_update(skip_locked=True).filter(state="new")
        by_kind: defaultdict[str, list[Item]] = defaultdict(list)
        for item in new.order_by("pk"):
            by_kind[item.kind].append(item)
        for kind, items in by_kind.items():
            try:
                with transaction.atomic():
                    outside.push(kind, [item.name for item in items])
                    pks = [item.pk for item in items]
                    Item.objects.filter(pk__in=pks).update(state="done")
            except ValueError:
                logger.exception("%s failed", kind)


def over_parents() -> None:
    waiting = Account.objects.filter(items__state="new").distinct()
    for pk in waiting.values_list("pk", flat=True):
        with transaction.atomic():
            account = Account.objects.select_for_update(skip_locked=True).filter(pk=pk).first()
            if account is None:
                continue
            items = list(account.items.filter(state="new").order_by("pk"))
            if items:
                outside.push(pk, [item.name for item in items])
                Item.objects.filter(pk__in=[item.pk for item in items]).update(state="done")


def in_order() -> None:
    tried: list[str] = []
    earlier = Item.objects.filter(state="new", kind=OuterRef("kind"), pk__lt=OuterRef("pk"))
    while True:
        due = Q(next_attempt_at=None) | Q(next_attempt_at__lte=timezone.now())
        with transaction.atomic():
            new = Item.objects.select_for_update(skip_locked=True).filter(due, state="new")
            heads = new.filter(~Exists(earlier)).exclude(kind__in=tried)
            item = heads.order_by("pk").first()
            if item is None:
                return
            try:
                with transaction.atomic():
                    outside.perform(item.name)
                    item.state = "done"
            except ValueError as error:
                tried.append(item.kind)
                item.attempts, item.last_error = item.attempts + 1, str(error)
                item.state = "new" if item.attempts < 2 else "failed"
                item.next_attempt_at = timezone.now() + timedelta(seconds=30)
            item.save(update_fields=["state", "attempts", "last_error", "next_attempt_at"])


def one_at_a_time() -> None:
    for pk in Item.objects.filter(state="new").values_list("pk", flat=True):
        try:
            with transaction.atomic():
                free = Item.objects.select_for_update(skip_locked=True)
                item = free.filter(pk=pk, state="new").first()
                if item is None:
                    continue
                with connection.cursor() as cursor:
                    cursor.execute("SELECT pg_advisory_xact_lock(hashtext(%s))", [item.kind])
                outside.perform(item.name)
                free.filter(pk=pk).update(state="done")
        except ValueError:
            logger.exception("item %s failed", pk)


def capped() -> None:
    tried: list[int] = []
    while True:
        now = timezone.now()
        with transaction.atomic():
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_advisory_xact_lock(1)")
            alive = Item.objects.filter(leased_until__gt=now)
            counts = Counter(alive.values_list("kind", flat=True))
            full = [kind for kind, count in counts.items() if count >= 2]
            free = Q(leased_until=None) | Q(leased_until__lte=now)
            new = Item.objects.select_for_update(skip_locked=True).filter(free, state="new")
            item = new.exclude(kind__in=full).exclude(pk__in=tried).first()
            if item is None:
                return
            tried.append(item.pk)
            item.leased_until = now + timedelta(minutes=1)
            item.save(update_fields=["leased_until"])
        try:
            outside.perform(item.name)
            item.state = "done"
        except ValueError:
            logger.exception("item %s failed", item.pk)
        item.leased_until = None
        item.save(update_fields=["state", "leased_until"])


def state_of_parent() -> None:
    new = Item.objects.filter(state="new", owner__closed=False)
    for pk in new.values_list("pk", flat=True):
        try:
            with transaction.atomic():
                free = Item.objects.select_for_update(skip_locked=True, of=("self",))
                item = free.filter(pk=pk, state="new", owner__closed=False).first()
                if item is not None:
                    outside.perform(item.name)
                    Item.objects.filter(pk=pk).update(state="done")
        except ValueError:
            logger.exception("item %s failed", pk)


def in_turn() -> None:
    for account in Account.objects.all():
        try:
            with transaction.atomic():
                new = Item.objects.select_for_update(skip_locked=True).filter(state="new")
                item = new.filter(owner=account).order_by("pk").first()
                if item is not None:
                    outside.perform(item.name)
                    Item.objects.filter(pk=item.pk).update(state="done")
        except ValueError:
            logger.exception("account %s failed", account.pk)
