"""What is recorded of runs and operators, when, and how fast rows are handled lately."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.test import override_settings
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from dcl_processor import ledger
from dcl_processor.ledger import run
from dcl_processor.ledger.models import Record
from dcl_processor.options.worker import this_user, worker_name
from tests.contract.support import errands as the
from tests.contract.support.gate import HAS_ROW_LOCKS
from tests.contract.support.reports import assert_run
from tests.models import Errand
from tests.test_counts import traced

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

NAME = "shop.recorded"


def processor(handler: Any = the.ignore, make: the.Make = the.transactional, **options: Any) -> Any:
    return make(handler, name=NAME, **options)


def ran(*, began: float, ended: float, rows: int, name: str = NAME) -> Record:
    """Record a run; ``began``, ``ended``: seconds ago."""
    now = timezone.now()
    times = {"at": now - timedelta(seconds=began), "seen_at": now - timedelta(seconds=ended)}
    return Record.objects.create(processor=name, action="run", by="web1:1:0", rows=rows, **times)


if connection.vendor == "postgresql":

    def test_the_ledger_adds_three_messages_to_a_run_of_one_row_and_two_to_the_next() -> None:
        def messages() -> int:
            the.errands(1)
            with traced() as sent:
                assert_run(processor()(), processed=1)
            return len(sent)

        messages()  # which tries the flip
        with override_settings(DCL_PROCESSOR_LEDGER=False):
            without = messages()
        Record.objects.all().delete()
        run._last.of.clear()
        assert [messages() - without for _ in range(2)] == [3, 2]


@the.all_deliveries
def test_a_run_is_one_record_with_its_counts_and_its_end(make: the.Make) -> None:
    the.errands(3)

    def handle(row: Errand) -> None:
        if row.place == 1:
            raise OSError("no route to postgres://anna:geheim@db/shop\nnow")

    processor(handle, make)()
    [found] = ledger.history(NAME)
    assert (found.action, found.by, found.stopped) == ("run", worker_name(), "drained")
    assert (found.rows, found.counts) == (3, {"processed": 2, "failed": 1})
    assert found.error == "OSError: no route to postgres://anna:***@db/shop now"
    assert found.rate > 0
    assert found.at <= found.seen_at
    assert found.as_dict()["at"].endswith("+00:00")
    assert ledger.history("shop.other") == []


def test_a_long_run_writes_what_it_has_done_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is killed has left a trace."""
    monkeypatch.setattr(run, "WRITE_EVERY", 0.0)
    the.errands(3)
    seen: list[int] = []

    def handle(_: Errand) -> None:
        seen.extend(each.rows for each in the.elsewhere(ledger.history))

    processor(handle, the.transactional if HAS_ROW_LOCKS else the.at_least_once)()
    assert seen == [0, 1, 2]


def test_a_run_that_is_interrupted_is_recorded_with_its_error() -> None:
    the.errands(2)

    def handle(row: Errand) -> None:
        if row.place == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        processor(handle)()
    [found] = ledger.history(NAME)
    assert (found.stopped, found.error) == ("signal", "KeyboardInterrupt")
    assert found.counts == {"processed": 1}


def test_an_empty_run_and_a_paused_one_record_nothing() -> None:
    assert_run(processor()())
    the.errands(1)
    Record.objects.all().delete()
    ledger.pause(NAME, by="anna")
    assert_run(processor()(), stopped="paused")
    [only] = ledger.history()
    assert (only.action, only.by) == ("pause", "anna")


def test_runs_that_follow_each_other_in_a_process_share_a_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A watch makes a run for each row that comes."""
    for _ in range(3):
        the.errands(1)
        processor()()
    [found] = ledger.history(NAME)
    assert found.counts == {"processed": 3}
    monkeypatch.setattr(run, "GO_ON_WITHIN", 0.0)
    the.errands(1)
    processor()()
    assert [each.rows for each in ledger.history(NAME)] == [1, 3]


def test_what_an_operator_has_done_is_recorded() -> None:
    ledger.record(NAME, "requeue", by="anna@shop1", rows=2, keys="7, 8")
    ledger.record(processor(), "discard", rows=1, keys="1", reason="spam" * 1_000, error="no")
    other, mine = ledger.history()
    assert (mine.processor, mine.action, mine.by, mine.rows) == (NAME, "requeue", "anna@shop1", 2)
    assert (mine.keys, mine.values, mine.reason, mine.error) == ("7, 8", "", "", "")
    assert (other.by, other.error, len(other.reason)) == (this_user(), "no", 500)
    assert ledger.history(limit=1) == [other]


def test_an_action_that_cannot_be_recorded_is_a_log_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Record._meta, "db_table", "no_such_table")
    ledger.record(NAME, "requeue", rows=1)
    assert f"{NAME}: the ledger has no record of this requeue: " in caplog.text


def test_the_states_of_many_processors_take_two_questions() -> None:
    last = ran(began=7_200, ended=3_600, rows=9)
    ran(began=5, ended=0, rows=10, name="shop.fast")
    ledger.pause("shop.fast")
    with CaptureQueriesContext(connection) as sent:
        slow, fast, never = ledger.states([NAME, "shop.fast", "shop.never"])
    assert len(sent) == 2
    assert (slow.rate, slow.last_run, slow.is_paused) == (None, last.seen_at, False)
    assert fast.rate == pytest.approx(2.0, rel=0.2)
    assert fast.is_paused
    assert (never.rate, never.last_run, never.pause) == (None, None, None)


def test_old_records_are_deleted() -> None:
    ran(began=31 * 86_400, ended=30 * 86_400, rows=1)
    at_work = ran(began=30 * 86_400, ended=1, rows=1)
    assert ledger.prune() == 1
    assert ledger.history() == [at_work]
    with override_settings(DCL_PROCESSOR_LEDGER_KEEP=None):
        assert ledger.prune() == 0
    assert ledger.prune(older_than=0) == 1


def test_runs_delete_old_records_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "PRUNE_EACH", 1)
    ran(began=31 * 86_400, ended=30 * 86_400, rows=1, name="shop.old")
    the.errands(1)
    processor()()
    assert [each.processor for each in ledger.history()] == [NAME]
