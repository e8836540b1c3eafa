"""What a status shows of the ledger: the pause, the pace, and the last run."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.test import override_settings
from django.utils import timezone

from dcl_processor import ledger
from dcl_processor.insights.status import status
from dcl_processor.ledger.models import Control, Record
from tests.contract.support import errands as the
from tests.contract.support.temporary import temporary

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

NAMES = ("paused", "last_run", "rate", "time_left")


def test_the_pace_of_all_machines_says_how_long_the_backlog_takes() -> None:
    run = the.transactional(the.ignore, name="tests.paced_by_ledger")
    the.errands(60)
    now = timezone.now()
    times = {"at": now - timedelta(seconds=100), "seen_at": now - timedelta(seconds=1)}
    Record.objects.create(processor=run.name, action="run", by="web1:1:0", rows=300, **times)
    found = status(run, only=NAMES)
    assert found.answers["rate"].value == pytest.approx(3.0, rel=0.05)
    assert found.answers["time_left"].value == pytest.approx(20.0, rel=0.05)
    assert found.answers["last_run"].value == times["seen_at"]
    assert (found.answers["paused"].value, found.kept_back) == (None, "")


def test_a_pause_is_a_state_and_says_why() -> None:
    run = the.transactional(the.ignore, name="tests.paused_by_ledger")
    the.errands(1)
    ledger.pause(run, reason="mail server down", by="anna")
    found = status(run, only=[*NAMES, "pending"])
    assert found.state == "paused"
    assert found.kept_back.endswith("by anna: mail server down")
    assert found.answers["paused"].least >= 0


def test_a_ledger_that_is_off_or_cannot_be_read_is_no_pause() -> None:
    run = the.transactional(the.ignore)
    with override_settings(DCL_PROCESSOR_LEDGER=False):
        assert status(run, only=["paused"]).answers["paused"].how == "not recorded"
    table = Control._meta.db_table
    with temporary(f"ALTER TABLE {table} RENAME TO lost", f"ALTER TABLE lost RENAME TO {table}"):
        found = status(run, only=["paused", "pending"])
    assert found.answers["paused"].how == "unknown"
    assert found.answers["pending"].value == 0
    assert found.states == ["?"]
