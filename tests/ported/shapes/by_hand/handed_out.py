from __future__ import annotations

from datetime import timedelta
from uuid import uuid4

from django.db import transaction
from django.db.models import Q
from django.utils import timezone

from tests.ported import outside
from tests.ported.models import Item


def pull(agent: str) -> list[tuple[str, str]]:
    now = timezone.now()
    free = Q(leased_until=None) | Q(leased_until__lte=now)
    with transaction.atomic():
        new = Item.objects.select_for_update(skip_locked=True).filter(free, state="new")
        item = new.first()
        if item is None:
            return []
        item.worker = f"{agent}:{uuid4()}"
        item.leased_until = now + timedelta(minutes=1)
        item.save(update_fields=["worker", "leased_until"])
    return [(item.worker, item.name)]


def report(agent: str, token: str, answer: str) -> None:
    if not token.startswith(f"{agent}:"):
        raise PermissionError
    held = Item.objects.filter(worker=token, state="new")
    if not held.update(state="done", result=answer, leased_until=None):
        raise LookupError


def poll() -> None:
    while rows := pull("agent"):
        for token, name in rows:
            report("agent", token, outside.ask(name))


def take() -> list[int]:
    with transaction.atomic():
        new = Item.objects.select_for_update(skip_locked=True).filter(state="new")
        item = new.exclude(worker="anna").order_by("pk").first()
        if item is None:
            return []
        item.state, item.started_at = "review", timezone.now()
        item.save(update_fields=["state", "started_at"])
    return [item.pk]


def settle(pk: int, answer: str) -> None:
    held = Item.objects.filter(pk=pk, state="review")
    if not held.update(state="done", result=answer, started_at=None):
        raise LookupError


def next_for_a_person() -> None:
    for pk in take():
        settle(pk, "yes")
