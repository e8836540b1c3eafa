"""What is recorded of runs: by whom it is written, when, and what it costs."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import OperationalError, connection
from django.test import TestCase, override_settings
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

import dcl_processor.ledger as api
from dcl_processor import oversight
from dcl_processor.ledger import desk, recording, records
from dcl_processor.ledger import ledger as module
from dcl_processor.ledger.ledger import Ledger
from dcl_processor.ledger.models import Control, Look, OperatorAction, RecordedRun
from dcl_processor.ledger.recording import Work
from dcl_processor.options.worker import host, this_user
from dcl_processor.oversight import Progress
from tests.contract.support import errands as the
from tests.contract.support.gate import HAS_ROW_LOCKS
from tests.contract.support.reports import assert_run
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

NAME = "shop.recorded"


def ran(**counts: int) -> Any:
    """Return the counts of a run that has tried these rows."""
    return SimpleNamespace(counts=Counter(counts))


def processor(handler: Any = the.ignore, **options: Any) -> Any:
    return the.transactional(handler, name=NAME, **options)


def test_a_run_is_one_row_with_its_counts_and_its_end() -> None:
    the.errands(3)

    def handle(row: Errand) -> None:
        if row.place == 1:
            raise OSError("no route to postgres://anna:geheim@db/shop\nnow")

    processor(handle)()
    (found,) = api.history(NAME)
    assert (found.state, found.kind, found.stopped) == ("finished", "code", "drained")
    assert found.counts == Counter(dict.fromkeys(recording.KEPT, 0)) | {"processed": 2, "failed": 1}
    assert found.error == "OSError: no route to postgres://anna:***@db/shop now"
    assert found.rate > 0
    assert found.started_at <= found.heartbeat_at
    assert found.finished_at is not None
    assert api.history("shop.other") == []


def test_an_interrupt_at_the_end_of_a_run_is_its_recorded_end(ledger: Ledger) -> None:
    """Its thread would write the run as one that is under way, for as long as the process lives."""
    the.errands(1)

    @contextmanager
    def opened() -> Iterator[None]:
        yield
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        processor(lambda *_: None, resource=opened)()
    assert ledger._records == []
    (found,) = api.history(NAME)
    assert (found.state, found.counts["processed"]) == ("finished", 1)


def test_an_empty_run_inserts_nothing_and_notes_when_this_host_has_looked() -> None:
    for _ in range(3):
        assert_run(processor()())
    assert RecordedRun.objects.count() == 0
    (look,) = Look.objects.all()
    assert (look.processor, look.host) == (NAME, host())
    assert abs(timezone.now() - look.looked_at) < timedelta(minutes=1)
    assert list(api.state(NAME).looked_at) == [host()]


def test_switched_off_it_sends_no_query_and_starts_no_thread(ledger: Ledger) -> None:
    the.errands(2)
    with override_settings(DCL_PROCESSOR_LEDGER=False), CaptureQueriesContext(connection) as sent:
        assert_run(processor()(), processed=2)
    assert not [each for each in sent if "dcl_processor_ledger" in each["sql"]]
    assert ledger.desk._thread is None
    assert Look.objects.count() + RecordedRun.objects.count() + Control.objects.count() == 0


def test_nothing_of_it_is_sent_on_the_connection_of_the_handlers() -> None:
    the.errands(20)
    with CaptureQueriesContext(connection) as sent:
        assert_run(processor(batch_size=2)(), processed=20)
    assert not [each for each in sent if "dcl_processor_ledger" in each["sql"]]
    assert RecordedRun.objects.count() == 1


def test_a_run_that_raises_is_recorded_with_its_error() -> None:
    the.errands(2)

    def handle(row: Errand) -> None:
        if row.place == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        processor(handle)()
    (found,) = api.history(NAME)
    assert (found.state, found.stopped, found.error) == ("finished", "signal", "KeyboardInterrupt")
    assert found.counts["processed"] == 1


def test_a_handler_that_takes_long_is_shown_while_it_works(ledger: Ledger) -> None:
    the.errands(1)
    shown: list[Any] = []

    def handle(row: Errand) -> None:
        for _ in range(600):
            if found := the.elsewhere(lambda: api.history(NAME)):
                shown.extend(found)
                return
            threading.Event().wait(0.05)

    make = the.transactional if HAS_ROW_LOCKS else the.at_least_once
    make(handle, name=NAME)()
    assert (shown[0].state, shown[0].counts["processed"]) == ("running", 0)
    assert [each.state for each in api.history(NAME)] == ["finished"]


def test_a_run_that_only_met_rows_of_other_workers_is_not_recorded() -> None:
    work = Work(NAME, "run")
    work.end(ran(stale=3))
    work.flush(is_last=True)
    assert RecordedRun.objects.count() == 0


def test_a_row_is_not_written_again_while_nothing_changes(monkeypatch: Any) -> None:
    work = Work(NAME, "watch")
    work.end(ran(processed=1))
    work.flush()
    before = RecordedRun.objects.get()
    work.flush()
    assert RecordedRun.objects.get().heartbeat_at == before.heartbeat_at
    monkeypatch.setattr(recording, "HEARTBEAT", 0.0)
    work.flush()
    assert RecordedRun.objects.get().heartbeat_at > before.heartbeat_at


@pytest.mark.parametrize("is_written", [True, False])
def test_a_record_whose_first_answer_was_lost_is_still_written_to_its_end(is_written: bool) -> None:
    work = Work(NAME, "run")
    work.end(ran(processed=1))

    def lost(execute: Any, *rest: Any) -> Any:
        if is_written:
            execute(*rest)
        raise OperationalError("server closed the connection unexpectedly")

    with connection.execute_wrapper(lost), pytest.raises(OperationalError):
        work.flush()
    work.flush(is_last=True)
    row = RecordedRun.objects.get()
    assert (row.finished_at is not None, row.counts["processed"]) == (True, 1)


def test_the_workers_of_a_command_are_one_row_and_one_that_died_is_not_forgotten() -> None:
    work = Work(NAME, "run")
    for number, pid, counts, error in (
        (1, 11, {"processed": 2}, ""),
        (2, 12, {"processed": 3, "failed": 1}, "no"),
        (1, 13, {"processed": 1}, ""),
    ):
        work.progress(number, Progress(pid, counts, since=1.0, error=error))
    work.flush()
    row = RecordedRun.objects.get()
    found = row.counts["processed"], row.counts["failed"], row.error
    assert found == (6, 1, "no")
    assert row.workers == [
        {"worker": 1, "pid": 13, "processed": 3},
        {"worker": 2, "pid": 12, "processed": 3, "failed": 1},
    ]


def test_a_worker_that_has_died_has_no_row_at_work_and_its_successor_counts() -> None:
    work = Work(NAME, "watch")
    work.progress(1, Progress(11, {"processed": 1}, since=1.0))
    work.flush()
    api.pause(NAME)
    work.worker_died(1, "killed by SIGKILL")
    work.flush()
    assert api.state(NAME).phase == "paused"
    assert RecordedRun.objects.get().error == "killed by SIGKILL"
    work.progress(1, Progress(12, {}))
    work.flush()
    assert api.state(NAME).phase == "paused"
    assert RecordedRun.objects.get().counts["processed"] == 1


@pytest.mark.parametrize(
    ("happens", "stopped"),
    [
        ("dies", "failures"),
        ("has a successor", "drained"),
        ("dies after its report", "drained"),
        ("dies in a run that was stopped", "signal"),
    ],
)
def test_a_command_whose_worker_died_for_good_has_not_drained_the_rows(
    happens: str, stopped: str
) -> None:
    work = Work(NAME, "run")
    is_last = happens == "dies after its report"
    work.progress(1, Progress(11, {"processed": 1}, since=1.0, is_last=is_last))
    work.worker_died(1, "killed by SIGKILL")
    if happens == "has a successor":
        work.progress(1, Progress(12, {"processed": 1}, is_last=True))
    work.stopped = "signal" if happens == "dies in a run that was stopped" else "drained"
    work.flush(is_last=True)
    assert RecordedRun.objects.get().stopped == stopped


def test_a_worker_that_has_sent_its_end_sends_no_earlier_state_after_it() -> None:
    """The thread of the ledger may have begun to flush before the end."""
    sent: list[Progress] = []
    work = Work(NAME, "run", send=lambda _, progress: sent.append(progress))
    work.flush(is_last=True)
    work.flush()
    assert [each.is_last for each in sent] == [True]


def failing(monkeypatch: pytest.MonkeyPatch, times: float) -> list[Work]:
    """Let the first tries to write the end of a record fail; return the tries."""
    real, tries = Work.flush, []

    def flush(work: Work, *, is_last: bool = False) -> None:
        if is_last:
            tries.append(work)
            if len(tries) <= times:
                raise OperationalError("terminating connection")
        real(work, is_last=is_last)

    monkeypatch.setattr(Work, "flush", flush)
    return tries


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Let time pass for the end of a record only while a run waits for it; return the waits."""
    waits: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: 1_000 + sum(waits), sleep=waits.append)
    monkeypatch.setattr(module, "time", clock)
    for pace in ("POLL", "IDLE"):  # the thread of the ledger tries nothing on its own schedule
        monkeypatch.setattr(desk, pace, 3600.0)
    monkeypatch.setattr(desk, "LATE", math.inf)  # a machine that stands still is no late answer
    return waits


def test_the_end_of_a_record_is_tried_again_at_once(
    monkeypatch: pytest.MonkeyPatch, seconds: list[float]
) -> None:
    """While the server restarts, for instance."""
    the.errands(1)
    tries = failing(monkeypatch, 20)
    processor()()
    assert len(tries) == 21
    assert api.history(NAME)[0].state == "finished"


def test_the_end_of_a_record_is_tried_for_five_seconds(
    monkeypatch: pytest.MonkeyPatch, seconds: list[float]
) -> None:
    the.errands(1)
    failing(monkeypatch, math.inf)
    processor()()
    assert sum(seconds) == pytest.approx(5, abs=0.2)


def test_no_end_is_tried_again_where_tables_are_missing(
    monkeypatch: pytest.MonkeyPatch, seconds: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    """As before ``migrate``: nothing was ever known, rows are handled, and there is one warning."""
    the.errands(1)
    for model in (Control, RecordedRun, Look):
        monkeypatch.setattr(model._meta, "db_table", "no_such_table")
    assert_run(processor()(), processed=1)
    assert seconds == []
    (told,) = [each.message for each in caplog.records if "the ledger" in each.message]
    assert "the ledger cannot be used, and its last known state holds" in told


def test_a_worker_without_a_heartbeat_is_shown_as_lost_and_nothing_else_happens() -> None:
    rows = the.errands(1)
    lost = Work(NAME, "watch")
    lost.begin(ran(processed=1))
    lost.flush()
    RecordedRun.objects.update(heartbeat_at=timezone.now() - timedelta(minutes=2))
    assert api.history(NAME)[0].state == "lost"
    api.pause(NAME)
    found = api.state(NAME)
    assert (found.phase, found.lost) == ("paused", 1)
    api.resume(NAME)
    assert_run(processor()(filter=the.only(rows[0])), processed=1)
    assert RecordedRun.objects.get(pk=lost.id).finished_at is None


def test_a_pause_is_pausing_until_all_commands_have_ended_their_row() -> None:
    works = [Work(NAME, "watch") for _ in range(2)]
    counts = ran(processed=1)
    for work in works:
        work.begin(counts)
        work.flush()
    api.pause(NAME)
    assert api.state(NAME).phase == "pausing"
    works[0].end(counts)  # it waits for rows
    works[0].flush()
    assert api.state(NAME).sentence.startswith("pausing since ")
    works[1].end(counts)
    works[1].flush(is_last=True)
    assert api.state(NAME).phase == "paused"


def test_old_records_are_deleted_in_chunks_and_those_at_work_stay(monkeypatch: Any) -> None:
    monkeypatch.setattr(records, "CHUNK", 2)
    long_ago = timezone.now() - timedelta(days=30)
    values = {"processor": NAME, "kind": "run", "host": "a", "pid": 1}
    RecordedRun.objects.bulk_create(
        RecordedRun(started_at=long_ago, heartbeat_at=long_ago, finished_at=long_ago, **values)
        for _ in range(5)
    )
    RecordedRun.objects.create(started_at=long_ago, heartbeat_at=long_ago, **values)  # lost
    watch = RecordedRun.objects.create(started_at=long_ago, heartbeat_at=timezone.now(), **values)
    young = RecordedRun.objects.create(
        started_at=timezone.now(), heartbeat_at=timezone.now(), finished_at=timezone.now(), **values
    )
    with CaptureQueriesContext(connection) as sent:
        assert api.prune() == 6
    assert len([each for each in sent if each["sql"].startswith("DELETE")]) == 3
    assert set(RecordedRun.objects.all()) == {watch, young}
    with override_settings(DCL_PROCESSOR_LEDGER_KEEP=None):
        assert api.prune() == 0
    assert api.prune(older_than=0) >= 1


def test_a_command_deletes_old_records_by_itself() -> None:
    the.errands(1)
    long_ago = timezone.now() - timedelta(days=15)
    RecordedRun.objects.create(
        processor=NAME, kind="run", host="a", pid=1, started_at=long_ago, heartbeat_at=long_ago
    )
    with oversight.command("run", [NAME]):
        processor()()
    (only,) = RecordedRun.objects.all()
    assert (only.kind, only.counts["processed"]) == ("run", 1)


def test_an_action_of_an_operator_is_recorded_and_deleted_when_it_is_old() -> None:
    records.add_action(NAME, "requeue", by="anna@shop1", rows=2, keys="7, 8")
    records.add_action("shop.other", "discard", rows=1, keys="1", reason="spam" * 1_000, error="no")
    other, mine = api.actions()
    assert (mine.processor, mine.action, mine.by, mine.rows) == (NAME, "requeue", "anna@shop1", 2)
    assert (mine.keys, mine.values, mine.reason, mine.error) == ("7, 8", "", "", "")
    assert (other.by, other.reason, other.error) == (this_user(), ("spam" * 1_000)[:500], "no")
    assert other.as_dict()["at"].endswith("+00:00")
    assert api.actions(NAME) == [mine]
    assert api.actions(limit=1) == [other]

    assert api.prune() == 0
    OperatorAction.objects.filter(processor=NAME).update(at=timezone.now() - timedelta(days=15))
    assert api.prune() == 1
    assert api.actions() == [other]


class InATestCase(TestCase):
    """The test's own connection is used, whose transaction takes all of it back."""

    def test_it_works_and_leaves_no_thread(self) -> None:
        from dcl_processor.ledger.ledger import ledger as find

        the.errands(2)
        api.pause(NAME)
        assert_run(processor()(), stopped="paused")
        api.resume(NAME)
        assert_run(processor()(), processed=2)
        assert RecordedRun.objects.get().counts["processed"] == 2
        assert find().desk._thread is None

    def test_its_end_is_tried_once(self) -> None:
        """Each further try would fail in the same transaction."""
        the.errands(1)
        with pytest.MonkeyPatch.context() as monkeypatch:
            tries = failing(monkeypatch, 1)
            assert_run(processor()(), processed=1)
        assert len(tries) == 1
