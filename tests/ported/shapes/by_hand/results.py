from __future__ import annotations

import logging

from django.db import transaction
from django.db.models import F
from django.utils import timezone

from tests.ported import outside
from tests.ported.models import Account, Item

logger = logging.getLogger(__name__)


def stamp() -> None:
    for pk in Item.objects.filter(finished_at=None).values_list("pk", flat=True):
        try:
            with transaction.atomic():
                free = Item.objects.select_for_update(skip_locked=True)
                item = free.filter(pk=pk, finished_at=None).first()
                if item is not None:
                    outside.perform(item.name)
                    free.filter(pk=pk).update(finished_at=timezone.now())
        except ValueError:
            logger.exception("item %s failed", pk)


def outcomes() -> None:
    for pk in Item.objects.filter(state="new").values_list("pk", flat=True):
        try:
            with transaction.atomic():
                free = Item.objects.select_for_update(skip_locked=True)
                item = free.filter(pk=pk, state="new").first()
                if item is not None:
                    free.filter(pk=pk).update(state=outside.ask(item.name))
        except ValueError:
            logger.exception("item %s failed", pk)


def values() -> None:
    for pk in Item.objects.filter(state="new").values_list("pk", flat=True):
        try:
            with transaction.atomic():
                free = Item.objects.select_for_update(skip_locked=True)
                item = free.filter(pk=pk, state="new").first()
                if item is not None:
                    answer = outside.ask(item.name)
                    now = timezone.now()
                    free.filter(pk=pk).update(state="done", result=answer, finished_at=now)
        except ValueError:
            logger.exception("item %s failed", pk)


def error_text() -> None:
    for pk in Item.objects.filter(state="new").values_list("pk", flat=True):
        with transaction.atomic():
            free = Item.objects.select_for_update(skip_locked=True)
            item = free.filter(pk=pk, state="new").first()
            if item is None:
                continue
            try:
                with transaction.atomic():
                    outside.perform(item.name)
                    free.filter(pk=pk).update(state="done")
            except ValueError as error:
                free.filter(pk=pk).update(state="failed", result=str(error))


def child_rows() -> None:
    for pk in Item.objects.filter(state="new").values_list("pk", flat=True):
        try:
            with transaction.atomic():
                free = Item.objects.select_for_update(skip_locked=True)
                item = free.filter(pk=pk, state="new").first()
                if item is not None:
                    item.parts.create(text="from work")
                    outside.perform(item.name)
                    free.filter(pk=pk).update(state="done")
        except ValueError:
            logger.exception("item %s failed", pk)


def rollup() -> None:
    with transaction.atomic():
        new = Item.objects.select_for_update(skip_locked=True).filter(state="new")
        for item in new:
            account = Account.objects.filter(pk=item.owner_id)
            account.update(balance=F("balance") + item.amount)
            item.state = "done"
            item.save(update_fields=["state"])


def own_method() -> None:
    for pk in Item.objects.filter(state="new").values_list("pk", flat=True):
        try:
            with transaction.atomic():
                free = Item.objects.select_for_update(skip_locked=True)
                item = free.filter(pk=pk, state="new").first()
                if item is not None:
                    outside.perform(item.name)
                    item.finish()
        except ValueError:
            logger.exception("item %s failed", pk)


def after_commit() -> None:
    with transaction.atomic():
        new = Item.objects.select_for_update(skip_locked=True).filter(state="new")
        items = list(new)
        Item.objects.filter(pk__in=[item.pk for item in items]).update(state="done")
    for item in items:
        outside.push(item.pk, [item.name])


def expire() -> None:
    while True:
        with transaction.atomic():
            new = Item.objects.select_for_update(skip_locked=True).filter(state="new")
            due = new.filter(due_at__lte=timezone.now()).values_list("pk", flat=True)
            pks = list(due[:100])
            if not pks:
                return
            Item.objects.filter(pk__in=pks).update(state="expired")
