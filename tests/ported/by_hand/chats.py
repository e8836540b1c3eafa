from __future__ import annotations

import logging
from datetime import timedelta

from django.db import transaction
from django.db.models import Exists, OuterRef, Q
from django.utils import timezone

from tests.ported import outside
from tests.ported.models import ChatUpdate

logger = logging.getLogger(__name__)

MOST_ATTEMPTS, BACKOFF, LEASE = 3, timedelta(seconds=60), timedelta(minutes=5)


def answer() -> None:
    put_back()
    while (update := claim()) is not None:
        try:
            outside.perform(update.text)
        except Exception as error:
            logger.exception("update %s failed", update.pk)
            fail(update, error)
        else:
            settle(update, "done")


def put_back() -> None:
    lapsed = ChatUpdate.objects.filter(state="running", leased_until__lt=timezone.now())
    lapsed.filter(attempts__gte=MOST_ATTEMPTS).update(state="failed", leased_until=None)
    lapsed.update(state="new", leased_until=None)


def claim() -> ChatUpdate | None:
    now = timezone.now()
    open_updates = ChatUpdate.objects.filter(state__in=["new", "running"])
    earlier = open_updates.filter(chat=OuterRef("chat"), number__lt=OuterRef("number"))
    with transaction.atomic():
        update = (
            ChatUpdate.objects.select_for_update(skip_locked=True)
            .filter(Q(next_attempt_at=None) | Q(next_attempt_at__lte=now))
            .filter(~Exists(earlier), state="new")
            .order_by("number")
            .first()
        )
        if update is not None:
            update.state, update.leased_until = "running", now + LEASE
            update.attempts += 1
            update.save(update_fields=["state", "leased_until", "attempts"])
    return update


def fail(update: ChatUpdate, error: Exception) -> None:
    update.last_error = repr(error)
    if update.attempts >= MOST_ATTEMPTS:
        settle(update, "failed")
    else:
        update.next_attempt_at = timezone.now() + BACKOFF * 2 ** (update.attempts - 1)
        settle(update, "new")


def settle(update: ChatUpdate, state: str) -> None:
    ours = ChatUpdate.objects.filter(pk=update.pk, leased_until=update.leased_until)
    ours.update(
        state=state,
        leased_until=None,
        next_attempt_at=update.next_attempt_at,
        last_error=update.last_error,
    )
