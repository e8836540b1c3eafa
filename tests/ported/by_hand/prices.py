from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

from django.db import transaction
from django.db.models import F, Q, QuerySet
from django.utils import timezone

from tests.ported import outside
from tests.ported.models import Price

logger = logging.getLogger(__name__)

TOGETHER, MOST_ATTEMPTS = 100, 3
BACKOFF, LEASE = timedelta(seconds=60), timedelta(minutes=5)


def push_prices() -> None:
    while rows := claim():
        try:
            answers = outside.mutate([(row.sku, row.amount) for row in rows])
        except Exception as error:
            logger.exception("%s prices were not pushed", len(rows))
            answers = [repr(error)] * len(rows)
        for row, refusal in zip(rows, answers, strict=True):
            if refusal is None:
                ours(row).update(state="shown", leased_until=None, last_error="")
            else:
                fail(row, refusal)


def claim() -> list[Price]:
    now = timezone.now()
    with transaction.atomic():
        rows = list(
            Price.objects.select_for_update(skip_locked=True)
            .filter(Q(leased_until=None) | Q(leased_until__lt=now))
            .filter(Q(next_attempt_at=None) | Q(next_attempt_at__lte=now))
            .filter(state="new", attempts__lt=MOST_ATTEMPTS)
            .order_by("pk")[:TOGETHER]
        )
        claimed = Price.objects.filter(pk__in=[row.pk for row in rows])
        claimed.update(attempts=F("attempts") + 1, leased_until=now + LEASE)
    for row in rows:
        row.attempts, row.leased_until = row.attempts + 1, now + LEASE
    return rows


def fail(row: Price, refusal: str) -> None:
    written: dict[str, Any] = {"last_error": refusal, "leased_until": None}
    if row.attempts >= MOST_ATTEMPTS:
        written["state"] = "refused"
    else:
        written["next_attempt_at"] = timezone.now() + BACKOFF * 2 ** (row.attempts - 1)
    ours(row).update(**written)


def ours(row: Price) -> QuerySet[Price]:
    return Price.objects.filter(pk=row.pk, leased_until=row.leased_until)
