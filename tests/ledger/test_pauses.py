"""Pause and resume, and what runs make of them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connection
from django.test import TestCase, override_settings
from django.test.utils import CaptureQueriesContext

from dcl_processor import ledger
from dcl_processor.exceptions import InvalidOption
from dcl_processor.ledger import control, run
from dcl_processor.ledger.models import Control, Record
from tests.contract.support import errands as the
from tests.contract.support.deadlocks import wait_until_a_session_waits
from tests.contract.support.gate import HAS_ROW_LOCKS
from tests.contract.support.reports import assert_run
from tests.contract.support.sessions import uncommitted
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

NAME = "shop.overseen"

#: On SQLite all other writers wait for a handler in its transaction.
BESIDE = [the.at_most_once, the.at_least_once, *([the.transactional] if HAS_ROW_LOCKS else [])]


def processor(handler: Any = the.ignore, make: the.Make = the.transactional, **options: Any) -> Any:
    return make(handler, name=NAME, **options)


def done() -> int:
    return Errand.objects.filter(done=True).count()


@the.all_deliveries
def test_a_run_of_a_paused_processor_handles_nothing_and_says_so(make: the.Make) -> None:
    the.errands(2)
    assert ledger.pause(NAME, reason="mail server down", by="anna")
    report = processor(make=make)()
    assert_run(report, stopped="paused")
    assert report.ok
    assert str(report).endswith("; paused")
    assert done() == 0
    assert ledger.resume(NAME)
    assert_run(processor(make=make)(), processed=2)


def test_a_pause_shows_who_why_and_since_when() -> None:
    ledger.pause(NAME, reason="mail\nserver", by="anna", until=3600)
    found = ledger.state(NAME)
    assert found.is_paused
    assert found.pause is not None
    assert (found.pause.by, found.pause.reason) == ("anna", "mail server")
    assert found.pause.until is not None
    assert timedelta(minutes=59) < found.pause.until - found.pause.since <= timedelta(hours=1)
    assert found.sentence.startswith("paused since ")
    assert " by anna, until " in found.sentence
    assert found.sentence.endswith(": mail server")
    assert found.as_dict()["pause"]["since"].endswith("+00:00")


def test_a_pause_ends_by_itself_at_its_time() -> None:
    the.errands(1)
    ledger.pause(NAME, until=3600)
    Control.objects.update(paused_until="2001-01-01T00:00:00Z")
    assert not ledger.state(NAME).is_paused
    assert_run(processor()(), processed=1)
    assert ledger.pause(NAME), "a pause that is over can be replaced"


def test_all_processors_are_paused_by_one_order_and_one_stays_paused_by_itself() -> None:
    the.errands(1)
    ledger.pause(NAME, by="anna")
    ledger.pause(ledger.ALL, by="ben")
    assert ledger.state("shop.other").is_paused
    both = ledger.state(NAME)
    assert both.pause is not None
    assert (both.pause.by, both.pause.of_all) == ("ben", True)
    assert both.sentence.startswith("all processors are paused since ")
    ledger.resume(ledger.ALL)
    assert not ledger.state("shop.other").is_paused
    assert_run(processor()(), stopped="paused")
    ledger.resume(NAME)
    assert_run(processor()(), processed=1)


@pytest.mark.parametrize("make", BESIDE)
def test_a_pause_lets_the_batch_at_hand_end_and_starts_no_other(
    make: the.Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "LOOK_EVERY", 0.0)
    the.errands(5)

    def handle(row: Errand) -> None:
        if row.place == 0:
            the.elsewhere(lambda: ledger.pause(NAME))

    assert_run(processor(handle, make, batch_size=2)(), processed=2, stopped="paused")
    assert done() == 2


def test_a_run_looks_at_most_once_a_second_on_its_own_connection() -> None:
    the.errands(20)
    with CaptureQueriesContext(connection) as sent:
        report = processor()()
    asked = [each for each in sent if Control._meta.db_table in each["sql"]]
    assert report.processed == 20
    assert 1 <= len(asked) <= 1 + report.duration


def test_an_empty_run_asks_nothing_of_the_ledger() -> None:
    with CaptureQueriesContext(connection) as sent:
        assert_run(processor()())
    assert not [each for each in sent if "dcl_processor_ledger" in each["sql"]]


def test_switched_off_it_sends_no_query() -> None:
    the.errands(2)
    ledger.pause(NAME)
    with override_settings(DCL_PROCESSOR_LEDGER=False), CaptureQueriesContext(connection) as sent:
        assert_run(processor()(), processed=2)
        ledger.record(NAME, "requeue")
    assert not [each for each in sent if "dcl_processor_ledger" in each["sql"]]
    assert [each.action for each in ledger.history()] == ["pause"]


def test_tables_that_are_missing_are_one_log_line_and_cost_no_row(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As before ``migrate``."""
    the.errands(3)
    for model in (Control, Record):
        monkeypatch.setattr(model._meta, "db_table", "no_such_table")
    assert_run(processor()(), processed=3)
    assert_run(processor()())
    [told] = [each.getMessage() for each in caplog.records if "the ledger" in each.getMessage()]
    assert told.startswith("the ledger cannot be used, and is not asked for 60 s: ")


@pytest.mark.parametrize("was_paused", [False, True])
def test_a_ledger_that_stops_to_answer_leaves_the_last_known_state(
    monkeypatch: pytest.MonkeyPatch, was_paused: bool
) -> None:
    """Also for the next runs of the process, such as those of a watch."""
    the.errands(2)
    if was_paused:
        ledger.pause(NAME)
    processor()(filter=the.only(the.errands(0)[0]))
    monkeypatch.setattr(Control._meta, "db_table", "no_such_table")
    stopped = "paused" if was_paused else "drained"
    for left in (0 if was_paused else 1, 0):
        assert_run(processor()(), processed=left, stopped=stopped)


@pytest.mark.parametrize("use_tz", [True, False])
@pytest.mark.parametrize("zone", [None, UTC])
def test_a_pause_until_a_time_that_is_over_is_refused(use_tz: bool, zone: Any) -> None:
    now = datetime.now(UTC).replace(tzinfo=zone)
    with override_settings(USE_TZ=use_tz):
        with pytest.raises(InvalidOption, match="give a time to come, or seconds from now"):
            control._end(now - timedelta(hours=26))  # over in every time zone
        ledger.pause(NAME, until=now + timedelta(hours=26))
        assert ledger.state(NAME).is_paused


class InATestCase(TestCase):
    """The transaction of the test takes all of it back."""

    def test_a_run_is_paused_resumed_and_recorded(self) -> None:
        the.errands(2)
        ledger.pause(NAME)
        assert_run(processor()(), stopped="paused")
        ledger.resume(NAME)
        assert_run(processor()(), processed=2)
        assert ledger.history()[0].counts == {"processed": 2}


# --- two orders

if HAS_ROW_LOCKS:

    def test_of_two_that_pause_at_once_one_does_and_the_other_learns_of_it() -> None:
        """Forced: the second statement waits for the lock of the first one's row."""
        Control.objects.create(processor=NAME)
        annas: list[bool] = []
        with (
            uncommitted(lambda: annas.append(ledger.pause(NAME, by="anna"))) as commit,
            the.meanwhile(lambda: ledger.pause(NAME, by="ben")) as bens,
        ):
            wait_until_a_session_waits()
            commit()
        assert (annas, bens) == ([True], [False])
        pause = ledger.state(NAME).pause
        assert pause is not None
        assert pause.by == "anna"
