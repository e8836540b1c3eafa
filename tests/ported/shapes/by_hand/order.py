from __future__ import annotations

import logging

from django.db import transaction
from django.utils import timezone

from tests.ported import outside
from tests.ported.models import Item

logger = logging.getLogger(__name__)


def priority() -> None:
    new = Item.objects.filter(state="new").order_by("-priority", "pk")
    for pk in new.values_list("pk", flat=True):
        try:
            with transaction.atomic():
                item = new.select_for_update(skip_locked=True).filter(pk=pk).first()
                if item is not None:
                    outside.perform(item.name)
                    Item.objects.filter(pk=pk).update(state="done")
        except ValueError:
            logger.exception("item %s failed", pk)


def scheduled() -> None:
    new = Item.objects.filter(state="new", due_at__lte=timezone.now())
    for pk in new.values_list("pk", flat=True):
        try:
            with transaction.atomic():
                item = new.select_for_update(skip_locked=True).filter(pk=pk).first()
                if item is not None:
                    outside.perform(item.name)
                    Item.objects.filter(pk=pk).update(state="done")
        except ValueError:
            logger.exception("item %s failed", pk)


def too_late() -> None:
    for pk in Item.objects.filter(state="new").values_list("pk", flat=True):
        with transaction.atomic():
            item = Item.objects.select_for_update(skip_locked=True).filter(pk=pk).first()
            if item is None or item.state != "new":
                continue
            try:
                with transaction.atomic():
                    if not item.is_due:
                        outside.perform(item.name)
                    item.state = "expired" if item.is_due else "done"
            except ValueError:
                item.state = "expired"
            item.save(update_fields=["state"])
