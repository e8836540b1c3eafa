from __future__ import annotations

from django.db.models import F

from dcl_processor import Discard, Retry, Snooze, batch_processor
from tests.ported.models import Account, Change


@batch_processor(
    pending=lambda: Change.objects.filter(state="new"),
    done={"state": "done"},
    failed={"state": "rejected"},
    retry=Retry(backoff=60),
)
def sync(change: Change) -> None:
    accounts = Account.objects.select_for_update(skip_locked=True)
    account = accounts.filter(pk=change.account_id).first()
    if account is None:
        raise Snooze("the account is locked")
    if account.closed:
        raise Discard("the account is closed")
    if account.balance + change.amount < 0:
        raise Discard("the balance is too small")
    account.balance = F("balance") + change.amount
    account.save(update_fields=["balance"])
