"""Pause, resume, stop and run now, and what runs make of them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.test import override_settings

from dcl_processor import ledger, oversight
from dcl_processor.exceptions import InvalidOption
from dcl_processor.ledger import ledger as process
from dcl_processor.ledger import orders
from dcl_processor.ledger.desk import UnreachableError
from dcl_processor.ledger.ledger import Ledger
from dcl_processor.ledger.models import Control, Look, RecordedRun
from tests.contract.support import errands as the
from tests.contract.support.gate import HAS_ROW_LOCKS
from tests.contract.support.reports import assert_run
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

NAME = "shop.overseen"


def processor(handler: Any = the.ignore, make: the.Make = the.transactional, **options: Any) -> Any:
    return make(handler, name=NAME, **options)


#: SQLite locks the whole database while a handler works in its transaction.
MAKE = the.transactional if HAS_ROW_LOCKS else the.at_least_once


def done() -> int:
    return Errand.objects.filter(done=True).count()


@pytest.mark.parametrize("make", [the.transactional, the.at_most_once, the.at_least_once])
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
    assert found.phase == "paused"
    assert found.pause is not None
    assert (found.pause.by, found.pause.reason) == ("anna", "mail server")
    assert found.pause.until is not None
    assert timedelta(minutes=59) < found.pause.until - found.pause.since <= timedelta(hours=1)
    assert found.sentence.startswith("paused since ")
    assert " by anna, until " in found.sentence
    assert found.sentence.endswith(": mail server")


def test_a_pause_ends_by_itself_at_its_time() -> None:
    the.errands(1)
    ledger.pause(NAME, until=3600)
    Control.objects.update(paused_until="2001-01-01T00:00:00Z")
    assert ledger.state(NAME).phase == "running"
    assert_run(processor()(), processed=1)
    assert ledger.pause(NAME), "a pause that is over can be replaced"


def test_all_processors_are_paused_by_one_order_and_one_stays_paused_by_itself() -> None:
    the.errands(1)
    ledger.pause(NAME, by="anna")
    ledger.pause(ledger.ALL, by="ben")
    assert ledger.state("shop.other").phase == "paused"
    both = ledger.state(NAME)
    assert both.pause is not None
    assert (both.pause.by, both.pause.of_all) == ("ben", True)
    ledger.resume(ledger.ALL)
    assert ledger.state("shop.other").phase == "running"
    assert_run(processor()(), stopped="paused")
    ledger.resume(NAME)
    assert_run(processor()(), processed=1)


def test_a_pause_lets_the_row_at_hand_end_and_starts_no_other(ledger: Ledger) -> None:
    import dcl_processor.ledger as api

    the.errands(3)

    def handle(row: Errand) -> None:
        the.elsewhere(lambda: api.pause(NAME))
        ledger.read_again(NAME)

    assert_run(processor(handle, MAKE, batch_size=3)(), processed=1, stopped="paused")
    assert done() == 1


def test_stop_ends_what_is_at_work_and_nothing_that_begins_later(ledger: Ledger) -> None:
    import dcl_processor.ledger as api

    the.errands(3)

    def handle(row: Errand) -> None:
        the.elsewhere(lambda: api.stop(NAME, by="anna"))
        ledger.read_again(NAME)

    report = processor(handle, MAKE)()
    assert_run(report, processed=1, stopped="operator")
    assert str(report).endswith("; stopped by operator")
    assert_run(processor()(), processed=2)


@pytest.mark.parametrize("is_stopped", [True, False])
def test_a_worker_that_starts_after_an_order_to_stop_its_command_follows_it(
    other_machine: Any, monkeypatch: pytest.MonkeyPatch, is_stopped: bool
) -> None:
    the.errands(2)
    ledger.stop(NAME)  # older than the command
    with oversight.command("run", [NAME]) as record:
        assert record is not None
        if is_stopped:
            ledger.stop(NAME)
        stops = record.begin_worker(1)
        # The process of a worker, which reads the orders for the first time.
        with monkeypatch.context() as worker:
            worker.setattr(process, "_ledger", other_machine())
            with oversight.worker([NAME], lambda *_: None, stops):
                report = processor(make=MAKE)()
    if is_stopped:
        assert_run(report, stopped="operator")
    else:
        assert_run(report, processed=2)


def test_reserve_hands_out_nothing_while_it_is_paused() -> None:
    the.errands(1)
    pack = processor(make=the.at_least_once)
    ledger.pause(NAME)
    assert pack.reserve() == []
    ledger.resume(NAME)
    assert len(pack.reserve()) == 1


def test_a_reservation_leaves_nothing_behind_in_the_ledger(ledger: Ledger) -> None:
    the.errands(2)
    pack = processor(make=the.at_least_once)
    assert len(pack.reserve(1)) == len(pack.reserve(1)) == 1
    assert (ledger._records, ledger._overseers) == ([], [])


@pytest.mark.parametrize("was_paused", [False, True])
def test_a_ledger_that_cannot_be_read_leaves_the_last_known_state(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, was_paused: bool, caplog: Any
) -> None:
    import dcl_processor.ledger as api

    the.errands(1)
    if was_paused:
        api.pause(NAME)
    processor()(limit=0)  # which reads the state

    def broken(do: Any, **_: Any) -> Any:
        raise UnreachableError("no ledger")

    monkeypatch.setattr(ledger.desk, "call", broken)
    # The table says the contrary, and cannot be read.
    if was_paused:
        api.resume(NAME)
        assert_run(processor()(), stopped="paused")
    else:
        api.pause(NAME)
        assert_run(processor()(), processed=1)


def test_a_ledger_without_tables_costs_a_warning_and_no_row(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As before ``migrate``: nothing was ever known, and rows are handled."""
    the.errands(1)
    table = "no_such_table"
    for model in (Control, RecordedRun, Look):
        monkeypatch.setattr(model._meta, "db_table", table)
    assert_run(processor()(), processed=1)
    assert "the ledger cannot be used, and its last known state holds" in caplog.text
    assert len([each for each in caplog.records if "the ledger" in each.message]) == 1


def test_an_order_needs_a_name_that_the_ledger_can_keep() -> None:
    with pytest.raises(InvalidOption, match="at most 255 characters"):
        ledger.pause("x" * 256)
    with pytest.raises(InvalidOption, match="expected until to be a number of seconds above 0"):
        ledger.pause(NAME, until=0)


@pytest.mark.parametrize("use_tz", [True, False])
@pytest.mark.parametrize("zone", [None, UTC])
def test_a_pause_until_a_time_that_is_over_is_refused(use_tz: bool, zone: Any) -> None:
    now = datetime.now(UTC).replace(tzinfo=zone)
    with override_settings(USE_TZ=use_tz):
        with pytest.raises(InvalidOption, match="expected until to be a time to come, got 20"):
            orders._end(now - timedelta(hours=26))  # over in every time zone
        assert orders._end(now + timedelta(hours=26)) is not None


def test_a_pause_for_no_time_is_refused_and_changes_nothing() -> None:
    for until in (timedelta(seconds=-5), datetime(2020, 1, 1, tzinfo=UTC)):
        with pytest.raises(InvalidOption, match="expected until to be a "):
            ledger.pause(NAME, until=until)
    assert ledger.state(NAME).phase == "running"
