from __future__ import annotations

from datetime import timedelta

from django.db import transaction
from django.db.models import F, Q
from django.utils import timezone

from tests.ported.models import Account, Change

LATER = timedelta(minutes=1)


def sync() -> None:
    tried: list[int] = []
    while True:
        with transaction.atomic():
            change = (
                Change.objects.select_for_update(skip_locked=True)
                .filter(Q(next_attempt_at=None) | Q(next_attempt_at__lte=timezone.now()))
                .filter(state="new")
                .exclude(pk__in=tried)
                .order_by("pk")
                .first()
            )
            if change is None:
                return
            tried.append(change.pk)
            apply(change)


def apply(change: Change) -> None:
    accounts = Account.objects.select_for_update(skip_locked=True)
    account = accounts.filter(pk=change.account_id).first()
    if account is None:
        defer(change)
    elif account.closed:
        reject(change, "the account is closed")
    elif account.balance + change.amount < 0:
        reject(change, "the balance is too small")
    else:
        account.balance = F("balance") + change.amount
        account.save(update_fields=["balance"])
        change.state = "done"
        change.save(update_fields=["state"])


def defer(change: Change) -> None:
    change.next_attempt_at = timezone.now() + LATER
    change.save(update_fields=["next_attempt_at"])


def reject(change: Change, why: str) -> None:
    change.state, change.last_error = "rejected", why
    change.save(update_fields=["state", "last_error"])
