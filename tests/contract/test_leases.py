"""The lease: who may have a row when, and what keeps it so."""

from __future__ import annotations

import logging
import os
import socket
import threading
from datetime import timedelta
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import OperationalError, connection
from django.db.models import F
from django.utils import timezone

from dcl_processor import Discard, Lease, Report, Snooze, worker_name
from dcl_processor.engine import heartbeat, marked
from dcl_processor.exceptions import InvalidDone
from tests.contract.support import errands as the
from tests.contract.support.clocks import Clock
from tests.contract.support.gate import HAS_ROW_LOCKS, run_and_meanwhile
from tests.contract.support.heartbeat import beats_through, begins_to_write, held_beat, writes
from tests.contract.support.marking import left_by_a_dead_worker, marking
from tests.contract.support.messages import updates
from tests.contract.support.reports import assert_run
from tests.contract.support.sessions import before_statement, end_session
from tests.contract.support.wanted import refuse_to_load
from tests.models import Errand
from tests.waiting import until

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

SHORT = Lease(1.5)


def leased_until(row: Errand) -> Any:
    return Errand.objects.using("other").values_list("leased_until", flat=True).get(pk=row.pk)


def lapse(row: Errand) -> None:
    """Let the lease lapse, as it does when its copy is cut off from the database for too long."""
    ago = timezone.now() - timedelta(days=1)
    Errand.objects.using("other").filter(pk=row.pk).update(leased_until=ago)


@pytest.mark.parametrize("fails", [False, True], ids=["handled", "failed"])
def test_a_lease_that_was_lost_in_the_work_settles_nothing(
    fails: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Two handlers have run, one has settled, the other says that it lost the lease."""
    [row] = the.errands(1)
    reports: list[Report] = []
    settled: dict[str, Any] = {}
    second = the.at_least_once(lambda row: "second", done=the.with_result, retry=the.retry())

    def handle(row: Errand) -> str:
        lapse(row)
        reports.append(the.elsewhere(second))
        settled.update(Errand.objects.using("other").values().get())
        if fails:
            raise ValueError
        return "first"

    run = the.at_least_once(handle, done=the.with_result, retry=the.retry(), failed={"dead": True})
    reports.insert(0, run())
    before, after = reports
    assert f"row {row.pk} was taken over" in caplog.text
    assert_run(before, lease_lost=1)
    assert_run(after, processed=1)
    assert Errand.objects.values().get(pk=row.pk) == settled
    assert settled["result"] == "second"
    assert settled["attempts"] == 0


def test_nothing_new_starts_on_a_row_whose_lease_was_lost() -> None:
    """The heartbeat finds out while the row before it is handled."""
    rows = the.errands(3)
    handled: list[Any] = []

    def handle(row: Errand) -> None:
        handled.append(row.pk)
        if row.pk == rows[0].pk:
            before = leased_until(rows[2])
            taken = timezone.now() + timedelta(days=1)
            Errand.objects.using("other").filter(pk=rows[1].pk).update(leased_until=taken)
            until(lambda: leased_until(rows[2]) > before)
            # What the first beat found out is noted before the second one writes.
            once = leased_until(rows[2])
            until(lambda: leased_until(rows[2]) > once)

    report = the.at_least_once(handle, lease=SHORT, batch_size=3, retry=the.retry())()
    assert handled == [rows[0].pk, rows[2].pk]
    assert_run(report, processed=2, lease_lost=1)
    assert the.state(rows[1])["leased_until"]


def test_a_renewal_between_the_handler_and_the_settlement_does_no_harm() -> None:
    """Held until the settlement is about to be sent, and then committed before it."""
    [row] = the.errands(1)
    with held_beat(writes) as beat:

        def renew_now() -> None:
            before = leased_until(row)
            beat.go.set()
            until(lambda: leased_until(row) > before)

        def handle(row: Errand) -> str:
            the.wait(beat.came, "a heartbeat")
            return "done"

        def settles(sql: str) -> bool:
            # MariaDB tries the lock first, which the heartbeat has; SQLite locks all.
            locks = "SKIP LOCKED" in sql or "WHERE 1 = 0" in sql
            writes = updates(sql) and "leased_until" in sql and "result" in sql
            return beat.came.is_set() and (writes or locks)

        run = the.at_least_once(handle, lease=SHORT, done=the.with_result)
        with before_statement(settles, renew_now):
            report = run()
    assert_run(report, processed=1)
    said = the.state(row)
    assert (said["result"], said["leased_until"]) == ("done", False)


def test_a_settlement_does_not_wait_for_a_heartbeat_that_hangs(beats_soon: None) -> None:
    """Its connection may be dead, and nothing says so for minutes."""
    rows = the.errands(2)
    with held_beat(lambda sql: sql.startswith("SELECT")) as beat:

        def handle(row: Errand) -> None:
            if row.pk == rows[0].pk:
                the.wait(beat.came, "a heartbeat")
            else:
                assert the.state(rows[0])["done"]
                beat.go.set()

        report = the.at_least_once(handle, lease=Lease(60), batch_size=2)()
    assert_run(report, processed=2)


def test_no_thread_and_no_session_is_left_behind() -> None:
    the.errands(3)
    during: list[Any] = []

    def handle(row: Errand) -> None:
        first = leased_until(row)
        until(lambda: leased_until(row) > first)
        during.append((the.our_threads(), the.sessions()))

    leased_until(Errand.objects.latest("pk"))  # connects
    before = the.sessions()
    report = the.at_least_once(handle, lease=SHORT)()
    assert_run(report, processed=3)
    assert [len(threads) for threads, _ in during] == [1, 1, 1]
    assert the.our_threads() == []
    if before:
        assert [len(sessions - before) for _, sessions in during] == [1, 1, 1]
        until(lambda: the.sessions() <= before)


if HAS_ROW_LOCKS:

    def test_a_heartbeat_whose_session_ended_connects_anew(
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        [_row] = the.errands(1)

        def handle(row: Errand) -> None:
            before = leased_until(row)
            the.wait(beat.came, "a heartbeat")
            beat.go.set()
            until(lambda: leased_until(row) > before + timedelta(seconds=1))

        with (
            held_beat(begins_to_write, first=end_session) as beat,
            caplog.at_level(logging.WARNING),
        ):
            report = the.at_least_once(handle, lease=Lease(2))()
        assert_run(report, processed=1)
        assert "the heartbeat did not renew the leases" in caplog.text
        assert the.our_threads() == []


@pytest.mark.parametrize("size", [1, 10])
def test_lost_leases_are_failures_one_after_the_other(size: int) -> None:
    the.errands(10)
    calls: list[int] = []

    def handle(row: Errand) -> None:
        calls.append(row.place)
        later = F("leased_until") + timedelta(hours=1)
        Errand.objects.filter(pk=row.pk).update(leased_until=later)

    report = the.at_least_once(handle, max_consecutive_failures=3, batch_size=size)()
    assert len(calls) == 3
    assert_run(report, lease_lost=3, stopped="failures")


# --- when leases are renewed, of which rows, and from when on they live


MINUTE = Lease(60)
#: No other number in a statement has these digits: they are one more than microseconds have.
KEYS = (7_100_001, 7_100_002, 7_100_003)


class Pauses(list[float | None]):
    """What the heartbeat waits for; while ``held``, a pause ends with the run only."""

    held = False
    #: Whether the heartbeat has met a pause that is held.
    resting = False


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> Pauses:
    """Note what the heartbeat waits for, and let it come at once."""
    noted = Pauses()

    class Soon(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            noted.append(timeout)
            while not super().wait(0.01):
                if not noted.held:
                    return False
                noted.resting = True
            return True

    monkeypatch.setattr(
        heartbeat, "threading", SimpleNamespace(**{**vars(threading), "Event": Soon})
    )
    return noted


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Let claims and heartbeats go by a clock that the test puts forward."""
    clock = Clock()
    monkeypatch.setattr(heartbeat, "time", clock)
    monkeypatch.setattr(marked, "time", clock)
    return clock


def test_leases_are_renewed_at_a_third_of_their_duration(pauses: list[float | None]) -> None:
    the.errands(1)
    report = the.at_least_once(lambda row: until(lambda: len(pauses) > 3), lease=MINUTE)()
    assert_run(report, processed=1)
    # A later beat may find the row locked by its settlement.
    assert set(pauses[:4]) == {20.0}


def test_a_renewal_that_failed_is_tried_again_after_a_twelfth(pauses: list[float | None]) -> None:
    the.errands(1)
    failed: list[Any] = []

    def fail_once(beating: Any) -> None:
        if not failed:
            failed.append(beating)
            raise OperationalError("no answer")

    with held_beat(lambda sql: True, first=fail_once) as beat:
        beat.go.set()
        report = the.at_least_once(lambda row: until(lambda: len(pauses) > 3), lease=MINUTE)()
    assert_run(report, processed=1)
    assert pauses[:3] == [20.0, 5.0, 20.0]


def test_rows_that_are_settled_are_renewed_no_more(pauses: Pauses) -> None:
    """A heartbeat that holds a row would put its settlement off, so it rests meanwhile."""
    Errand.objects.bulk_create([Errand(pk=key, place=n) for n, key in enumerate(KEYS)])
    beats: list[int] = []
    #: The parameters of the heartbeats, each with the number of the pause before it.
    said: list[tuple[int, str]] = []

    def note(execute: Any, sql: str, params: Any, *args: Any) -> Any:
        said.append((len(pauses), repr(params)))
        return execute(sql, params, *args)

    def handle(row: Errand) -> None:
        pauses.held = False
        beats.append(len(pauses))
        until(lambda: len(pauses) > beats[-1] + 1)
        pauses.held, pauses.resting = row.pk != KEYS[-1], False
        until(lambda: pauses.resting or not pauses.held)

    with beats_through(note):
        report = the.at_least_once(handle, lease=MINUTE, batch_size=3)()
    assert_run(report, processed=3)
    # The beat that ends the rest looks at the rows after the settlement.
    before = [params for beat, params in said if beat < beats[1]]
    after = [params for beat, params in said if beat >= beats[2]]
    assert all(any(str(key) in params for params in before) for key in KEYS)
    assert any(str(KEYS[-1]) in params for params in after)
    assert not any(str(key) in params for params in after for key in KEYS[:-1])


def test_a_lease_lives_from_the_beginning_of_its_claim(time: Clock) -> None:
    """Its time is written by a statement that may take longer than the lease."""
    [row] = the.errands(1)
    calls: list[Any] = []

    def slowly(execute: Any, sql: str, *args: Any) -> Any:
        if sql.startswith("UPDATE") and not time.passed:
            time.passed = 61.0
        return execute(sql, *args)

    run = the.at_least_once(lambda row: calls.append(row.pk), lease=MINUTE)
    with connection.execute_wrapper(slowly):
        report = run()
    assert_run(report, lease_lost=1)
    assert calls == []
    assert the.untouched(row)


def test_a_lease_lives_from_the_beginning_of_its_renewal(time: Clock, pauses: Pauses) -> None:
    first, second = the.errands(2)
    calls: list[Any] = []

    with held_beat(writes) as beat:

        def handle(row: Errand) -> None:
            calls.append(row.pk)
            the.wait(beat.came, "a heartbeat")
            time.passed = 61.0
            under_way = len(pauses)
            pauses.held = True  # the next one would renew the lease again
            beat.go.set()
            until(lambda: len(pauses) > under_way)

        report = the.at_least_once(handle, lease=MINUTE, batch_size=2)()
    assert_run(report, processed=1, lease_lost=1)
    assert calls == [first.pk]
    assert the.untouched(second)


# --- AT_LEAST_ONCE: leased and committed before the work, settled if the lease is still held


@the.each_question
@the.each_size
def test_lease_and_attempt_are_committed_before_the_handler(question: Any, size: int) -> None:
    rows = the.errands(5)
    seen: list[Any] = []

    def look(row: Errand) -> None:
        assert not connection.in_atomic_block
        other = Errand.objects.using("other").get(pk=row.pk)
        assert (row.attempts, row.leased_until) == (other.attempts, other.leased_until)
        seen.append((other.attempts, other.leased_until is not None, other.done))

    run = the.at_least_once(look, pending=question, batch_size=size, retry=the.retry())
    report = run()
    assert_run(report, processed=5)
    assert seen == [(1, True, False)] * 5
    expected = {**the.state(rows[0]), "done": True, "attempts": 0, "leased_until": False}
    assert [the.state(row) for row in rows] == [expected] * 5


@the.each_delivery
@the.each_question
@the.each_size
@pytest.mark.parametrize("at", [0, 1], ids=["first batch", "later batch"])
def test_racing_copies_call_one_handler_for_each_row(
    make: the.Make, question: Any, size: int, at: int
) -> None:
    """The second copy runs in full between the first one's snapshot and its lock."""
    rows = the.errands(6)
    handled: list[Any] = []

    def run(using: str) -> Report:
        copy = make(
            lambda row: handled.append(row.pk), pending=question, using=using, batch_size=size
        )
        return copy()

    reports: list[Report] = []
    first = run_and_meanwhile(lambda: run("default"), lambda: reports.append(run("other")), at=at)
    reports.append(first)
    assert sorted(handled) == [row.pk for row in rows]
    assert sum(report.processed for report in reports) == 6
    assert not any(report.failed or report.lease_lost for report in reports)


# --- the mark beside a lease: a row shows that it is being handled, and stays in ``pending``


def seen(row: Any) -> dict[str, Any]:
    """Return what other sessions read of a row now."""
    read = the.elsewhere(lambda: Errand.objects.using("other").get(pk=row.pk))
    times = {name: getattr(read, name) is not None for name in ("claimed_at", "leased_until")}
    return {"claimed": read.claimed, "result": read.result, "attempts": read.attempts, **times}


MARKED = {"claimed": True, "result": "me", "attempts": 1, "claimed_at": True, "leased_until": True}
UNMARKED = {"claimed": False, "result": "", "claimed_at": False, "leased_until": False}


@pytest.mark.parametrize("size", [1, 3])
def test_the_mark_is_there_while_the_handler_works_and_gone_afterwards(size: int) -> None:
    rows = the.errands(3)
    while_at_work: list[Any] = []

    def handle(row: Errand) -> None:
        while_at_work.append(seen(row))
        assert (row.claimed, row.result, row.claimed_at is not None) == (True, "me", True)

    assert_run(marking(handle, batch_size=size)(), processed=3)
    assert while_at_work == [MARKED] * 3
    for row in rows:
        said = the.state(row)
        # Only the times go with a success; the rest is what done writes.
        assert (said["done"], said["claimed"], said["result"]) == (True, False, "me")
        assert (said["claimed_at"], said["leased_until"]) == (False, False)


fail, snooze, discard = map(the.raising, (ValueError("no"), Snooze(), Discard("never")))


@pytest.mark.parametrize("taken_over", [False, True], ids=["fresh", "taken over"])
@pytest.mark.parametrize(
    ("handler", "options", "expected"),
    [
        (fail, {}, {"attempts": 1}),
        (fail, {"retry": None}, {"attempts": 0}),
        (fail, {"retry": None, "failed": {"dead": True}}, {"attempts": 0, "dead": True}),
        (fail, {"retry": the.retry(max_attempts=1), "failed": {"dead": True}}, {"dead": True}),
        (fail, {"retry": the.retry(max_attempts=1)}, {"attempts": 1}),
        (snooze, {}, {"attempts": 0}),
        (snooze, {"retry": None}, {"attempts": 0}),
        (discard, {"failed": {"dead": True, "result": "why"}}, {"dead": True, "result": "why"}),
        (discard, {}, {}),
    ],
)
def test_what_is_not_handled_gets_reset_and_never_the_mark_that_was_there_before(
    handler: Any, options: dict[str, Any], expected: dict[str, Any], taken_over: bool
) -> None:
    row = left_by_a_dead_worker(attempts=0) if taken_over else the.errands(1)[0]
    marking(handler, **options)()
    said = the.state(row)
    assert {name: said[name] for name in {**UNMARKED, **expected}} == {**UNMARKED, **expected}
    assert not said["done"]


def assert_as_the_dead_worker_left_it(row: Errand) -> None:
    said = the.state(row)
    assert said == {**said, **MARKED, "result": "dead", "attempts": 0, "done": False}
    assert_run(marking(the.ignore)(filter=the.only(row)), processed=1)


def test_a_row_that_was_not_started_is_put_back_as_it_was() -> None:
    """The run stops after the first row of its batch."""
    the.errands(1)
    other = left_by_a_dead_worker(attempts=0)
    stop = Event()
    report = marking(lambda row: stop.set(), batch_size=2)(stop=stop)
    assert_run(report, processed=1, stopped="signal")
    assert_as_the_dead_worker_left_it(other)


@pytest.mark.parametrize("is_async", [False, True], ids=["def", "async def"])
@pytest.mark.parametrize("size", [1, 10])
def test_the_attempts_show_the_handler_that_a_worker_died_with_the_row(
    size: int, is_async: bool
) -> None:
    rows = [*the.errands(2), left_by_a_dead_worker(place=2)]
    seen: dict[Any, int] = {}

    def look(row: Errand) -> None:
        seen[row.pk] = row.attempts

    async def look_later(row: Errand) -> None:
        look(row)

    run = marking(look_later if is_async else look, batch_size=size)
    assert_run(run(), processed=3)
    assert [seen[row.pk] for row in rows] == [1, 1, 2]


# --- a row must stay in pending under its mark


LOST = Errand.objects.filter(claimed=False, done=False)


def test_a_mark_that_takes_its_row_out_of_pending_is_refused_before_any_handler() -> None:
    [row] = the.errands(1)
    handled: list[Any] = []
    run = marking(lambda row: handled.append(row.pk), pending=LOST)
    words = (
        r"expected claim={'claimed': True, .*} to keep row \d+ in pending under its lease, .* got "
        r"a row that left pending; .* add … \| Q\(claimed=True, leased_until__isnull=False\) to"
    )
    with pytest.raises(InvalidDone, match=words):
        run()
    assert (handled, the.untouched(row)) == ([], True)


# --- which rows are in progress


def test_in_progress_is_what_has_a_mark_and_a_living_lease() -> None:
    left_by_a_dead_worker()
    rows = the.errands(1)[:2]
    found: list[Any] = []

    def handle(row: Errand) -> None:
        asked = run.in_progress().using("other").values_list("pk", "result")
        found.append(the.elsewhere(lambda: list(asked)))

    run = marking(handle)
    assert not run.in_progress().exists()
    assert_run(run(), processed=2)
    assert sorted(found) == [[(row.pk, "me")] for row in rows]
    assert not run.in_progress().exists()


def test_in_progress_is_what_is_leased_or_claimed_without_a_mark_on_a_lease() -> None:
    [leased, claimed, _] = the.errands(3)
    soon = timezone.now() + timedelta(hours=1)
    Errand.objects.filter(pk=leased.pk).update(leased_until=soon)
    Errand.objects.filter(pk=claimed.pk).update(claimed=True, claimed_at=timezone.now())
    assert list(the.at_least_once(the.ignore).in_progress()) == [leased]
    assert list(the.at_most_once(the.ignore).in_progress()) == [claimed]


# --- the worker's name


def test_the_name_of_a_worker_is_its_host_its_process_and_its_number() -> None:
    assert worker_name() == f"{socket.gethostname()[:64]}:{os.getpid()}:0"
    the.errands(1)
    names: list[str] = []
    claim = {"claimed": True, "result": worker_name}
    assert_run(marking(lambda row: names.append(row.result), claim=claim)(), processed=1)
    assert names == [worker_name()]


# Elsewhere a claim is several statements.
if connection.features.has_select_for_no_key_update:

    def test_a_row_that_cannot_be_loaded_is_put_back_as_it_was(
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        rows = the.errands(1)
        bad = left_by_a_dead_worker(attempts=0)
        with monkeypatch.context() as patch:
            refuse_to_load(bad, patch)
            report = marking(the.ignore)()
        assert_run(report, processed=1, failed=1)
        assert the.state(rows[0])["done"]
        assert_as_the_dead_worker_left_it(bad)
