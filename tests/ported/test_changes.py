"""Changes of accounts: applied under its lock, deferred while it is locked, or rejected."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event
from typing import Any

import pytest
from django.db import transaction

from dcl_processor.testing import race
from tests.contract.support import errands as the
from tests.ported.as_processor.changes import sync
from tests.ported.by_hand import changes
from tests.ported.models import Account, Change
from tests.ported.workers import together

pytestmark = pytest.mark.django_db(transaction=True)

each_way = pytest.mark.parametrize("loop", [changes.sync, sync], ids=["by hand", "as a processor"])


def change(account: Account, *amounts: int) -> list[Change]:
    return [Change.objects.create(account=account, amount=amount) for amount in amounts]


def states() -> list[str]:
    return list(Change.objects.order_by("pk").values_list("state", flat=True))


def balance(account: Account) -> int:
    return Account.objects.get(pk=account.pk).balance


def make_due() -> None:
    Change.objects.update(next_attempt_at=None)


@each_way
def test_a_change_is_applied_once_or_rejected_for_good(loop: Callable[[], Any]) -> None:
    account = Account.objects.create(balance=5)
    closed = Account.objects.create(closed=True)
    change(account, 3, -100, -8)
    change(closed, 1)
    for _ in range(2):
        loop()
        assert states() == ["done", "rejected", "done", "rejected"]
        assert (balance(account), balance(closed)) == (0, 0)
    errors = Change.objects.filter(state="rejected").order_by("pk")
    small, shut = errors.values_list("last_error", flat=True)
    assert "the balance is too small" in small
    assert "the account is closed" in shut


@each_way
def test_while_the_account_is_locked_its_changes_are_deferred(loop: Callable[[], Any]) -> None:
    """The loop does not wait: the changes of other accounts are applied meanwhile."""
    busy, free = Account.objects.create(), Account.objects.create()
    (late,) = change(busy, 1)
    change(free, 1)
    held, done = Event(), Event()

    def hold() -> None:
        with transaction.atomic():
            Account.objects.select_for_update().get(pk=busy.pk)
            held.set()
            the.wait(done)

    with the.meanwhile(hold):
        try:
            the.wait(held)
            loop()
        finally:
            done.set()
    assert states() == ["new", "done"]
    late.refresh_from_db()
    assert late.next_attempt_at is not None
    assert late.attempts == 0
    loop()
    assert states() == ["new", "done"]
    make_due()
    loop()
    assert states() == ["done", "done"]
    assert (balance(busy), balance(free)) == (1, 1)


@each_way
def test_workers_together_apply_each_change_once(loop: Callable[[], Any]) -> None:
    one, two = Account.objects.create(), Account.objects.create()
    for amount in range(1, 7):
        change(one, amount)
        change(two, amount)
    together(loop)
    for _ in range(12):
        make_due()
        loop()
    assert states() == ["done"] * 12
    assert (balance(one), balance(two)) == (21, 21)


def test_in_a_race_of_processors_each_change_is_applied_once() -> None:
    account = Account.objects.create()
    change(account, 1, 2, 4)
    race(sync, copies=3)
    make_due()
    sync()
    assert states() == ["done"] * 3
    assert balance(account) == 7
