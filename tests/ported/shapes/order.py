from __future__ import annotations

from django.db.models.functions import Now

from dcl_processor import Discard, batch_processor
from tests.ported import outside
from tests.ported.models import Item


@batch_processor(
    pending=lambda: Item.objects.filter(state="new").order_by("-priority", "pk"),
    done={"state": "done"},
    strict_order=True,
)
def priority(item: Item) -> None:
    outside.perform(item.name)


@batch_processor(
    pending=lambda: Item.objects.filter(state="new", due_at__lte=Now()), done={"state": "done"}
)
def scheduled(item: Item) -> None:
    outside.perform(item.name)


@batch_processor(
    pending=lambda: Item.objects.filter(state="new"),
    done={"state": "done"},
    failed={"state": "expired"},
)
def too_late(item: Item) -> None:
    if item.is_due:
        raise Discard("too late")
    outside.perform(item.name)
