"""What an operator does about rows that are in doubt, or were given up."""

from __future__ import annotations

from datetime import timedelta
from itertools import count
from threading import Event
from typing import Any

import pytest
from django.db import IntegrityError, connection, transaction
from django.db.models.expressions import RawSQL
from django.utils import timezone

from dcl_processor import BatchProcessor, Retry
from dcl_processor.exceptions import InsideTransaction, InvalidOption, StillPending
from dcl_processor.operator import actions
from dcl_processor.operator.actions import Written, to_mark_done, to_requeue
from tests.contract.support import errands as the
from tests.contract.support.gate import HAS_ROW_LOCKS
from tests.contract.support.reports import assert_run
from tests.contract.support.sessions import before_statement, time_limits, uncommitted
from tests.contract.support.temporary import temporary
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


def processor(handler: Any = the.ignore, **options: Any) -> BatchProcessor[Errand]:
    given = {"reset": {"claimed": False}, "failed": {"dead": True}}
    return the.at_most_once(handler, **{**given, **options})


def as_a_killed_process_leaves_it(*, minutes: float) -> Errand:
    since = timezone.now() - timedelta(minutes=minutes)
    return Errand.objects.create(claimed=True, claimed_at=since)


def test_in_doubt_is_what_was_claimed_for_longer_than_that() -> None:
    old, young = (as_a_killed_process_leaves_it(minutes=minutes) for minutes in (10, 1))
    Errand.objects.create()
    run = processor()
    assert list(run.in_doubt(older_than=0)) == [old, young]
    assert list(run.in_doubt(older_than=300)) == [old]
    assert list(run.in_doubt(older_than=timedelta(hours=1))) == []
    assert_run(run(), processed=1)
    assert list(run.in_doubt(older_than=0)) == [old, young]


def test_mark_done_settles_what_is_in_doubt_or_given_up_and_nothing_else() -> None:
    doubtful = as_a_killed_process_leaves_it(minutes=10)
    pending, dead = Errand.objects.create(), Errand.objects.create(claimed=True, dead=True)
    run = processor()
    assert run.mark_done(Errand.objects.all()) == 2
    for row in (doubtful, dead):
        said = the.state(row)
        assert (said["done"], said["claimed_at"]) == (True, False)
    assert the.untouched(pending)
    assert run.mark_done(Errand.objects.all()) == 0


if connection.vendor == "postgresql":

    def test_rows_whose_commit_fails_for_contention_are_left() -> None:
        """A deferred constraint is checked there, and may have to wait for another session."""
        doubtful = as_a_killed_process_leaves_it(minutes=10)
        with temporary(
            "CREATE FUNCTION fail_late() RETURNS trigger LANGUAGE plpgsql AS "
            "'BEGIN RAISE EXCEPTION ''late'' USING ERRCODE = ''40001''; END'; "
            "CREATE CONSTRAINT TRIGGER late AFTER UPDATE ON tests_errand "
            "DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION fail_late()",
            "DROP FUNCTION fail_late CASCADE",
        ):
            assert processor().requeue(Errand.objects.all()) == 0
        before = the.state(doubtful)
        assert before == the.state(as_a_killed_process_leaves_it(minutes=10))


@the.all_deliveries
def test_a_row_that_was_given_up_and_then_handled_by_hand_is_marked_done(make: Any) -> None:
    refuse = the.raising(ValueError("no such place"))
    row, waits = the.errands(2)
    run = make(refuse, reset={"claimed": False}, retry=the.retry(max_attempts=1))
    assert_run(run(filter=the.only(row)), failed=1)
    assert run.mark_done(Errand.objects.all()) == 1
    row.refresh_from_db()
    assert (row.done, row.attempts, row.last_error) == (True, 0, "")
    assert the.untouched(waits)
    assert run.mark_done(Errand.objects.filter(pk=waits.pk), force=True) == 1


def test_requeue_leaves_a_row_that_is_done_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """A charge that is paid would be paid twice."""
    paid, _ = the.errands(2)
    doubtful = as_a_killed_process_leaves_it(minutes=10)
    run = processor()
    assert_run(run(filter=the.only(paid)), processed=1)
    assert run.requeue(Errand.objects.all()) == 2
    assert the.state(paid)["done"]
    assert the.untouched(doubtful)
    said = f"requeue() left rows as they are, 1 of them ({paid.pk}): done, or not waiting yet"
    assert [said in line for line in caplog.messages] == [True]
    assert run.requeue(Errand.objects.filter(pk=paid.pk)) == 0
    assert run.requeue(Errand.objects.filter(pk=paid.pk), force=True) == 1
    assert not the.state(paid)["claimed"]


def leasing(handler: Any = the.ignore, **options: Any) -> BatchProcessor[Errand]:
    """Make a processor with a lease, which has all three actions."""
    given = {
        "claim": {"result": "claimed"},
        "reset": {"result": "", "done": False},
        "failed": {"dead": True},
    }
    return the.at_least_once(handler, **{**given, **options})


each_action = pytest.mark.parametrize("act", ["requeue", "mark_done", "discard"])


@each_action
def test_a_row_that_a_living_worker_has_leased_is_left_to_it(act: str) -> None:
    """It was put back from under its feet, and another worker would have begun with it."""
    [row] = the.errands(1)
    said: list[Any] = []

    def handle(row: Errand) -> None:
        before = the.state(row)
        rows = Errand.objects.filter(pk=row.pk)
        said.append(the.elsewhere(lambda: getattr(run, act)(rows)))
        assert the.state(row) == before
        # Another worker does not find it.
        assert_run(the.elsewhere(run))

    run = leasing(handle)
    assert_run(run(limit=1), processed=1)
    assert said == [0]
    assert (the.state(row)["done"], the.state(row)["dead"]) == (True, False)


@each_action
def test_a_lapsed_lease_that_its_worker_renews_after_the_choice_holds_its_row(act: str) -> None:
    """It was free when it was chosen, and is not when it is locked."""
    since = timezone.now() - timedelta(minutes=10)
    row, other = the.errands(2, result="claimed", leased_until=since)
    run = leasing()

    def renew() -> None:
        rows = Errand.objects.filter(pk=row.pk)
        the.elsewhere(lambda: rows.update(leased_until=timezone.now() + timedelta(minutes=1)))

    with before_statement(is_lock, renew):
        assert getattr(run, act)(Errand.objects.all()) == 1
    assert the.state(row)["leased_until"]
    assert not the.state(other)["leased_until"]


@each_action
def test_force_takes_a_row_whatever_its_state(act: str) -> None:
    row = Errand.objects.create(claimed=True, done=True, dead=True)
    run = processor(failed={"dead": True, "done": False})
    assert getattr(run, act)(Errand.objects.all(), force=True) == 1
    said = the.state(row)
    assert (said["claimed"], said["done"]) == (act != "requeue", act != "discard")


@each_action
def test_a_claim_that_a_worker_may_be_at_work_on_is_left_without_force(
    act: str, caplog: pytest.LogCaptureFixture
) -> None:
    young, old = (as_a_killed_process_leaves_it(minutes=minutes) for minutes in (0, 10))
    run = processor()
    assert getattr(run, act)(Errand.objects.all()) == 1
    assert the.state(young)["claimed_at"]
    assert not the.state(old)["claimed_at"]
    assert f"({young.pk}): claimed less than 60 s ago: a worker may be at work" in caplog.text
    assert getattr(run, act)(Errand.objects.filter(pk=young.pk), force=True) == 1


@each_action
def test_a_row_with_a_mark_and_no_lease_is_in_no_run_and_can_be_acted_on(act: str) -> None:
    """A loop without leases has left it, and no run takes it."""
    Errand.objects.create(result="claimed")
    settled = Errand.objects.create(result="claimed", done=True)
    free = Errand.objects.filter(result="") | Errand.objects.filter(leased_until__isnull=False)
    run = leasing(pending=lambda: free.filter(done=False, dead=False))
    assert_run(run())
    assert getattr(run, act)(Errand.objects.all()) == 1
    assert the.state(settled)["result"] == "claimed"
    # It is in no state any more that the action is for, or else it is pending now.
    assert run().processed == (act == "requeue")


def test_without_a_time_no_column_tells_a_claimed_row_from_a_handled_one() -> None:
    """A settled row keeps the constants of its claim."""
    Errand.objects.create(claimed=True, done=True)
    Errand.objects.create(claimed=True)
    run = processor(claimed_at=None)
    for act in (run.mark_done, run.discard):
        with pytest.raises(InvalidOption, match=f"expected claimed_at=… for {act.__name__}"):
            act(Errand.objects.all(), values={"dead": True})
    assert run.requeue(Errand.objects.all()) == 0
    assert not Errand.objects.filter(dead=True).exists()


def is_lock(sql: str) -> bool:
    """Recognise the statement with which an action locks its rows, on each database."""
    if HAS_ROW_LOCKS:
        return "FOR UPDATE" in sql or "FOR NO KEY UPDATE" in sql
    return sql.startswith("UPDATE") and "WHERE 1 = 0" in sql


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("by_function", [False, True])
def test_a_row_that_is_settled_after_it_was_chosen_is_not_put_back(
    by_function: bool, force: bool
) -> None:
    """A TRANSACTIONAL worker has it at the choice, and commits before the action gets the lock."""
    row, other = the.errands(2)
    at_work, goes_on, has_ended = Event(), Event(), Event()

    def handle(row: Errand) -> None:
        at_work.set()
        the.wait(goes_on)

    # Of a flip by a function, no column is known.
    options = {"done": lambda row: {"done": True}, "reset": {"result": ""}} if by_function else {}
    run = the.transactional(handle, **{"reset": {"done": False}, **options})

    def work() -> Any:
        try:
            return run(filter=the.only(row))
        finally:
            has_ended.set()

    def commit() -> None:
        goes_on.set()
        the.wait(has_ended)

    with the.meanwhile(work) as reports:
        the.wait(at_work)
        with before_statement(is_lock, commit):
            assert run.requeue(Errand.objects.all(), force=force) == 1
    assert_run(reports[0], processed=1)
    assert (the.state(row)["done"], the.untouched(other)) == (True, True)


def test_a_row_that_was_put_back_and_failed_alike_is_known_by_the_values_of_its_failure() -> None:
    """It has as many attempts, and the same error: only ``failed`` wrote another value."""
    row, other = the.errands(2)
    number = count()
    fail = the.raising(ValueError("no route"))
    failed = {"dead": True, "result": lambda: f"failure {next(number)}"}
    run = the.transactional(fail, reset={"dead": False}, failed=failed, retry=Retry(1))
    assert_run(run(), failed=2)
    mine = Errand.objects.filter(pk=row.pk)
    write = to_requeue(run, Errand.objects.all())
    seen = write.choose().rows
    before: dict[str, Any] = {**mine.values().get()}

    def put_back_and_fail() -> None:
        assert the.elsewhere(lambda: run.requeue(mine)) == 1
        assert_run(the.elsewhere(lambda: run(filter=the.only(row))), failed=1)

    with before_statement(is_lock, put_back_and_fail):
        assert run.requeue(Errand.objects.all()) == 1
    now: dict[str, Any] = {**mine.values().get()}
    assert [name for name in now if now[name] != before[name]] == ["result"]
    assert the.state(other)["dead"] is False
    # So it is left as well if it changed after it was shown, and before it is written to.
    written = Written()
    to_requeue(run, mine).to_free({row.pk: seen[row.pk]}, written, seconds=1)
    assert written == Written([], [row.pk])


@pytest.mark.parametrize("make", [the.transactional, the.at_least_once])
def test_a_given_up_row_that_stays_in_pending_is_put_back_without_reset(make: Any) -> None:
    """Only its attempts have to be cleared; a row that is done cannot be put back, with force."""
    row, other = the.errands(2)

    def work(each: Errand) -> None:
        if each == row and not is_fixed.is_set():
            raise ValueError("no route")

    is_fixed = Event()
    run = make(work, retry=the.retry(max_attempts=1))
    assert_run(run(), processed=1, failed=1)
    assert_run(run())
    assert run.requeue(Errand.objects.all()) == 1
    assert the.untouched(row)
    assert run.requeue(Errand.objects.all(), force=True) == 1
    assert the.state(other)["done"] is True
    is_fixed.set()
    assert_run(run(), processed=1)
    assert run.requeue(Errand.objects.all(), force=True) == 0
    assert Errand.objects.filter(done=True).count() == 2


@pytest.mark.parametrize(
    "again",
    [{"attempts": 2}, {"next_attempt_at": timezone.now()}, {"last_error": "ValueError: no driver"}],
    ids=lambda again: next(iter(again)),
)
def test_a_row_that_was_put_back_and_failed_again_is_left(again: dict[str, Any]) -> None:
    """It is in the same state, and is not what the operator saw."""
    row, other = the.errands(2, dead=True, attempts=3, last_error="ValueError: no route")
    run = processor(retry=the.retry(), reset={"claimed": False, "dead": False})
    write, written = to_requeue(run, Errand.objects.all()), Written()
    chosen = write.choose().rows
    Errand.objects.filter(pk=row.pk).update(**again)
    write.to_free(chosen, written, seconds=1)
    assert (written.written, written.changed) == ([other.pk], [row.pk])
    assert (the.state(row)["dead"], the.untouched(other)) == (True, True)


def test_values_that_the_database_refuses_are_written_to_no_row_and_the_session_is_as_before() -> (
    None
):
    rows = [as_a_killed_process_leaves_it(minutes=10) for _ in range(3)]
    run, before = processor(reset={"claimed": False, "code": "new"}), time_limits()
    with pytest.raises(IntegrityError):
        run.requeue(run.in_doubt(older_than=60))
    assert time_limits() == before
    assert [the.state(row)["claimed"] for row in rows] == [True, True, True]
    assert the.state(rows[1])["claimed_at"]


def test_a_row_that_stays_locked_is_left_and_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(actions, "LONGEST", 0.3)
    rows = [as_a_killed_process_leaves_it(minutes=10) for _ in range(3)]
    with uncommitted(lambda: Errand.objects.filter(pk=rows[1].pk).update(place=7)):
        number = processor().requeue(Errand.objects.all())
    free = [rows[0].pk, rows[2].pk] if HAS_ROW_LOCKS else []
    assert number == len(free)
    assert [*Errand.objects.filter(claimed=False).values_list("pk", flat=True)] == free
    named = f"1 of them ({rows[1].pk}): locked by other" if HAS_ROW_LOCKS else "3 of them"
    assert named in caplog.text


# --- inside a transaction of the caller's


@each_action
def test_an_action_in_a_transaction_is_refused_and_nothing_is_written(act: str) -> None:
    """Its snapshot may be older than what a worker has committed since."""
    row = as_a_killed_process_leaves_it(minutes=10)
    words = rf"expected {act}\(\) outside any transaction, because each row is committed separately"
    with pytest.raises(InsideTransaction, match=words), transaction.atomic():
        getattr(processor(), act)(Errand.objects.all())
    assert the.state(row)["claimed_at"]


# --- values that do not settle a row


@pytest.mark.parametrize(("act", "column"), [("mark_done", "done"), ("discard", "dead")])
def test_values_are_written_besides_those_of_the_option(act: str, column: str) -> None:
    row = as_a_killed_process_leaves_it(minutes=10)
    run = processor()
    assert getattr(run, act)(run.in_doubt(older_than=60), values={"result": "seen"}) == 1
    state = the.state(row)
    assert (state["result"], state[column], state["claimed_at"]) == ("seen", True, False)


def test_without_an_option_values_that_leave_a_row_claimed_are_refused() -> None:
    """Without its time, the claim would be in doubt nowhere, and no run would take the row."""
    row = as_a_killed_process_leaves_it(minutes=10)
    run = processor(done=lambda row: {"done": True})
    for values in (None, {}, {"done": True}):
        with pytest.raises(InvalidOption, match=r"with each column of claim, got (done|no values)"):
            run.mark_done(run.in_doubt(older_than=60), values=values)
    assert the.state(row)["claimed"]
    values = {"done": True, "claimed": False}
    assert run.mark_done(run.in_doubt(older_than=60), values=values) == 1


def test_values_that_leave_a_row_pending_are_refused() -> None:
    row = Errand.objects.create()
    with pytest.raises(StillPending, match=f"expected row {row.pk} to leave pending once it was"):
        the.transactional(the.ignore).discard(Errand.objects.all(), values={"result": "no"})
    assert the.untouched(row)
    assert Errand.objects.get().result == ""


def test_the_time_that_an_action_takes_is_limited(caplog: pytest.LogCaptureFixture) -> None:
    """SQLite has no limit, and no function that takes its time."""
    if connection.vendor == "sqlite":
        return
    slow = "pg_sleep(60)::text" if connection.vendor == "postgresql" else "SLEEP(60)"
    row, before = as_a_killed_process_leaves_it(minutes=10), time_limits()
    run = processor()
    values = {"result": RawSQL(slow, [])}  # noqa: S611  # a constant
    write, written = to_mark_done(run, run.in_doubt(older_than=60), values), Written()
    write.to_free(write.choose().rows, written, seconds=0.2)
    assert (written.written, written.locked) == ([], [row.pk])
    assert time_limits() == before
