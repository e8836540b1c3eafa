"""Two operators, and two machines, at the same moment; for databases that lock rows."""

from __future__ import annotations

import threading

import pytest
from django.db import OperationalError, transaction

from dcl_processor import ledger
from dcl_processor.ledger import models
from dcl_processor.ledger.models import Control, ensure
from tests.contract.support import errands as the
from tests.contract.support.deadlocks import wait_until_a_session_waits

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

NAME = "shop.raced"


def test_of_two_that_pause_at_once_one_does_and_the_other_learns_of_it() -> None:
    """Forced: the second statement waits for the lock of the first one's row."""
    ensure(NAME)
    first = threading.Event()
    go_on = threading.Event()

    def anna() -> bool:
        with transaction.atomic():
            won = ledger.pause(NAME, by="anna")
            first.set()
            the.wait(go_on)
        return won

    with the.meanwhile(anna) as annas:
        the.wait(first)
        with the.meanwhile(lambda: ledger.pause(NAME, by="ben")) as bens:
            wait_until_a_session_waits()
            go_on.set()
    assert (annas, bens) == ([True], [False])
    pause = ledger.state(NAME).pause
    assert pause is not None
    assert pause.by == "anna"


def test_an_order_does_not_wait_without_end_for_a_row_that_another_session_has_locked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Forced: the other session keeps its lock until the order has ended."""
    monkeypatch.setattr(models, "LOCK_WAIT", 0.2)
    ensure(NAME)
    locked, go_on = threading.Event(), threading.Event()

    def forgotten() -> None:
        with transaction.atomic():
            list(Control.objects.select_for_update())
            locked.set()
            the.wait(go_on)

    def give() -> None:
        with pytest.raises(OperationalError):
            ledger.pause(NAME)

    with the.meanwhile(forgotten):
        the.wait(locked)
        try:
            with the.meanwhile(give):
                pass
        finally:
            go_on.set()
    assert ledger.state(NAME).pause is None
    assert ledger.pause(NAME)
