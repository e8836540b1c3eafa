from __future__ import annotations

from django.db import transaction
from django.db.models import F
from django.db.models.functions import Now

from dcl_processor import batch_processor
from tests.ported import outside
from tests.ported.models import Account, Item


@batch_processor(pending=lambda: Item.objects.filter(finished_at=None), done={"finished_at": Now()})
def stamp(item: Item) -> None:
    outside.perform(item.name)


@batch_processor(
    pending=lambda: Item.objects.filter(state="new"), done=lambda item, answer: {"state": answer}
)
def outcomes(item: Item) -> str:
    return outside.ask(item.name)


@batch_processor(
    pending=lambda: Item.objects.filter(state="new"),
    done=lambda item, answer: {"state": "done", "result": answer, "finished_at": Now()},
)
def values(item: Item) -> str:
    return outside.ask(item.name)


@batch_processor(
    pending=lambda: Item.objects.filter(state="new"),
    done={"state": "done"},
    failed=lambda item, error: {"state": "failed", "result": str(error)},
)
def error_text(item: Item) -> None:
    outside.perform(item.name)


@batch_processor(pending=lambda: Item.objects.filter(state="new"), done={"state": "done"})
def child_rows(item: Item) -> None:
    item.parts.create(text="from work")
    outside.perform(item.name)


@batch_processor(pending=lambda: Item.objects.filter(state="new"), done={"state": "done"})
def rollup(item: Item) -> None:
    Account.objects.filter(pk=item.owner_id).update(balance=F("balance") + item.amount)


@batch_processor(pending=lambda: Item.objects.filter(state="new"))
def own_method(item: Item) -> None:
    outside.perform(item.name)
    item.finish()


@batch_processor(pending=lambda: Item.objects.filter(state="new"), done={"state": "done"})
def after_commit(item: Item) -> None:
    transaction.on_commit(lambda: outside.push(item.pk, [item.name]))


@batch_processor(
    pending=lambda: Item.objects.filter(state="new", due_at__lte=Now()),
    done={"state": "expired"},
    batch_size=100,
)
def expire(item: Item) -> None:
    """Nothing is to be done but the flip."""
