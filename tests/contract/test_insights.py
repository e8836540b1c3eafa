"""What is known of a processor's rows: the same answers on every database, or why there is none."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connection, transaction
from django.db.models import F, Func, IntegerField
from django.utils import timezone

from dcl_processor import BatchProcessor, batch_processor
from dcl_processor.exceptions import Unsupported
from dcl_processor.insights.answer import Answer, Asker, Moment
from dcl_processor.insights.doctor import Level, examine
from dcl_processor.insights.explanation import explanation
from dcl_processor.insights.rows import Listed, Row, listed, show
from dcl_processor.insights.status import ASKED, LINE, status, troubles_first
from dcl_processor.pending import steady
from tests.contract.support import errands as the
from tests.contract.support.groups import rows_of
from tests.contract.support.marking import marking
from tests.contract.support.sessions import connected, time_limits
from tests.contract.support.temporary import temporary
from tests.models import Depot, Errand, Parcel, Scan

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


def ago(**duration: float) -> datetime:
    return timezone.now() - timedelta(**duration)


def ask(run: BatchProcessor[Any], **options: Any) -> dict[str, Any]:
    """Return the answers about the rows, without that of the ledger."""
    return dict(status(run, **{"only": [*ASKED], **options}).answers)


def answers(run: BatchProcessor[Any], **options: Any) -> dict[str, Any]:
    """Return the values of a status."""
    found = ask(run, **options)
    return {name: answer.value for name, answer in found.items()}


def seconds(answer: Answer[Moment]) -> float:
    assert answer.value is not None
    return round(answer.value.seconds, -1)


NOTHING = {**dict.fromkeys(ASKED, 0), "oldest": None}


def test_a_status_without_rows_has_exact_zeros() -> None:
    run = the.at_least_once(the.ignore, retry=the.retry(), pending_since="claimed_at")
    found = status(run, only=[*ASKED])
    assert answers(run) == NOTHING
    assert {answer.how for answer in found.answers.values()} == {"exact"}
    assert (found.name, found.delivery, found.using) == (run.name, "at_least_once", "default")


def test_what_no_column_records_is_no_zero() -> None:
    found = ask(the.transactional(the.ignore, failed={"done": True}))
    said = {name for name, answer in found.items() if answer.how == "not recorded"}
    assert said == {"oldest", "in_progress", "given_up"}
    assert found["oldest"].why == "set pending_since=…"
    assert all(found[name].value is None for name in said)
    claimless = the.at_most_once(the.ignore, claim=None, claimed_at=None)
    assert ask(claimless)["in_doubt"].how == "not recorded"


def test_rows_are_counted_by_their_condition() -> None:
    run = the.at_least_once(the.ignore, retry=the.retry(max_attempts=3), pending_since="claimed_at")
    the.errands(2)
    Errand.objects.create(next_attempt_at=ago(minutes=-10), attempts=1, last_error="OSError: a")
    Errand.objects.create(next_attempt_at=ago(minutes=10), attempts=1, last_error="OSError: b")
    Errand.objects.create(leased_until=ago(minutes=-1), attempts=3)
    Errand.objects.create(leased_until=ago(minutes=1), attempts=1)
    Errand.objects.create(attempts=2, last_error="KeyError: 'c'")
    Errand.objects.create(attempts=3, leased_until=ago(minutes=1))
    Errand.objects.create(done=True)
    Errand.objects.create(done=True, leased_until=ago(minutes=1))
    found = ask(run)
    assert [found[name].value for name in ("pending", "due", "later")] == [8, 5, 1]
    assert found["in_progress"].value == 1
    assert found["given_up"].value == 1  # without attempts left
    assert found["in_doubt"].value == 0


def test_the_oldest_row_that_has_attempts_left_gives_the_age() -> None:
    run = the.transactional(the.ignore, retry=the.retry(), pending_since="claimed_at")
    for minutes, values in (
        (90, {"done": True}),
        (80, {"attempts": 3}),
        (40, {"attempts": 2}),
        (20, {}),
    ):
        Errand.objects.create(claimed_at=ago(minutes=minutes), **values)
    assert seconds(ask(run)["oldest"]) == 2400
    expression = the.transactional(the.ignore, pending_since=F("claimed_at") + timedelta(minutes=5))
    assert seconds(ask(expression)["oldest"]) == 4500


def test_ages_are_by_the_databases_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    run = the.transactional(the.ignore, pending_since="claimed_at")
    Errand.objects.create(claimed_at=ago(minutes=20))
    ahead = timezone.now() + timedelta(hours=7)
    monkeypatch.setattr(timezone, "now", lambda: ahead)
    answer = ask(run)["oldest"]
    assert seconds(answer) == 1200
    assert answer.value.at.tzinfo is UTC
    document = answer.as_dict()
    assert document["value"] == answer.value.at.isoformat()
    assert document["seconds"] == answer.value.seconds


def test_an_old_claim_is_in_doubt_and_a_young_one_in_progress() -> None:
    run = the.at_most_once(the.ignore)
    Errand.objects.create(claimed=True, claimed_at=ago(minutes=10))
    Errand.objects.create(claimed=True, claimed_at=ago(minutes=20))
    Errand.objects.create(claimed=True, claimed_at=ago(seconds=10))
    Errand.objects.create(claimed=True, done=True)
    found = ask(run)
    assert (found["in_progress"].value, found["in_doubt"].value) == (1, 2)
    found = ask(run, doubt_after=900)
    assert (found["in_progress"].value, found["in_doubt"].value) == (2, 1)
    found = ask(run, doubt_after=0)
    assert (found["in_progress"].value, found["in_doubt"].value) == (1, 2)


# --- rows that wait for their key


if connection.vendor != "mysql":  # which has no keys

    def keyed(make: the.Make, **options: Any) -> BatchProcessor[Any]:
        return make(the.ignore, group_by="place", retry=the.retry(), **options)

    def due_and_held(run: BatchProcessor[Any]) -> tuple[int, int]:
        found = answers(run, only=("due", "held"))
        return found["due"], found["held"]

    def test_rows_of_a_key_whose_places_are_taken_are_held_and_not_due() -> None:
        """Nothing would start them now, and no retry time says so."""
        first, _, last, *_ = rows_of(1, 1, 1, 2, 2)
        Errand.objects.filter(pk=first.pk).update(leased_until=ago(hours=-1))
        Errand.objects.create(place=2, next_attempt_at=ago(hours=-1))
        run = keyed(the.at_least_once)
        assert due_and_held(run) == (2, 2)
        assert known(run, last).parts["held"] is True
        assert reason(run, last).startswith("it waits for its key")
        assert due_and_held(keyed(the.at_least_once, max_per_group=2)) == (4, 0)
        assert due_and_held(the.at_least_once(the.ignore, retry=the.retry())) == (4, 0)

    def test_a_row_in_doubt_holds_its_key() -> None:
        rows_of(1, 1)
        Errand.objects.create(place=1, claimed=True, claimed_at=ago(hours=2))
        assert due_and_held(keyed(the.at_most_once, reset={"claimed": False})) == (0, 2)

    def test_a_lapsed_lease_holds_no_key() -> None:
        """The next run takes its row over, and then the others."""
        Errand.objects.create(place=1, leased_until=ago(minutes=1))
        Errand.objects.create(place=1)
        assert due_and_held(keyed(the.at_least_once)) == (2, 0)

    def test_in_order_rows_behind_one_that_is_not_due_are_held() -> None:
        first, *_ = rows_of(1, 1, 2, 2)
        run = keyed(the.transactional, in_order=True)
        assert due_and_held(run) == (4, 0)
        Errand.objects.filter(pk=first.pk).update(next_attempt_at=ago(hours=-1))
        assert due_and_held(run) == (2, 1)


# --- how long until it is done


def test_the_time_left_follows_from_two_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    run, now = the.transactional(the.ignore, name="tests.paced"), [1000.0]
    monkeypatch.setattr(steady, "monotonic", lambda: now[0])
    the.errands(100)
    first = status(run, only=["rate", "time_left"]).answers
    assert {each.how for each in first.values()} == {"not recorded"}
    Errand.objects.filter(place__lt=40).update(done=True)
    now[0] += 20
    second = status(run, only=["rate", "time_left"]).answers
    assert {name: each.value for name, each in second.items()} == {"rate": 2.0, "time_left": 30.0}
    now[0] += 20
    third = status(run, only=["rate", "time_left"]).answers
    assert (third["rate"].value, third["time_left"].how) == (0.0, "not recorded")
    the.errands(9)
    now[0] += 20
    assert status(run, only=["rate"]).answers["rate"].value == 0.0


# --- the states of a processor


def test_a_processor_in_trouble_comes_first() -> None:
    idle = the.transactional(the.ignore, name="tests.idle", pending=Errand.objects.none())
    doubtful = the.at_most_once(the.ignore, name="tests.doubtful")
    the.errands(1)
    Errand.objects.create(claimed=True, claimed_at=ago(hours=1))
    waits = the.transactional(the.ignore, name="tests.waits")
    found = [status(each, only=[*LINE]) for each in (idle, waits, doubtful)]
    assert [(each.name, each.state) for each in troubles_first(found)] == [
        ("tests.doubtful", "in doubt"),
        ("tests.waits", "waiting"),
        ("tests.idle", "idle"),
    ]


# --- the rows of a state


def pages(run: BatchProcessor[Any], state: str, **options: Any) -> list[Listed]:
    """Return all rows, page by page."""
    found, after = list[Listed](), None
    while True:
        page = listed(run, state, after=after, **options).value
        assert page is not None
        found += page.rows
        after = page.after
        if after is None:
            return found


def test_all_rows_of_a_state_are_listed_in_pages() -> None:
    run = the.at_least_once(
        the.ignore, retry=the.retry(), failed={"dead": True}, pending_since="claimed_at"
    )
    the.errands(7, dead=True, attempts=3, last_error="OSError: no\nroute", claimed_at=ago(hours=1))
    found = pages(run, "given_up", size=3)
    assert [each.pk for each in found] == [row.pk for row in Errand.objects.order_by("pk")]
    row = found[0]
    assert (row.key, row.attempts, row.error) == (str(row.pk), 3, "OSError: no route")
    assert row.since is not None
    assert round(row.since.seconds, -1) == 3600
    assert list(row.as_dict()) == ["key", "since", "seconds", "attempts", "error"]
    assert pages(run, "due") == []


def test_the_time_of_a_listed_row_is_that_of_its_state() -> None:
    run = the.at_most_once(the.ignore, retry=the.retry(), reset={"claimed": False})
    Errand.objects.create(claimed=True, claimed_at=ago(hours=2))
    Errand.objects.create(next_attempt_at=ago(hours=-3))
    for state, hours in (("in_doubt", 2), ("later", -3)):
        (row,) = pages(run, state)
        assert row.since is not None
        assert round(row.since.seconds / 3600) == hours


def test_a_row_that_a_join_gives_twice_is_listed_once() -> None:
    depot = Depot.objects.create(name="north")
    parcel = Parcel.objects.create(depot=depot)
    for _ in range(3):
        Scan.objects.create(parcel=parcel)
    pending = Parcel.objects.filter(sent=False, scans__ok=True)
    run = batch_processor(pending=pending, done={"sent": True})(the.ignore)
    assert [each.pk for each in pages(run, "due", size=2)] == [parcel.pk]


def test_rows_of_what_no_column_records_cannot_be_listed() -> None:
    found = listed(the.at_most_once(the.ignore, claim=None, claimed_at=None), "in_doubt")
    assert (found.value, found.how) == (None, "not recorded")


def test_a_row_with_a_mark_and_no_lease_is_named() -> None:
    """An older loop has left it, no worker takes it, and it is in no other state."""
    left = Errand.objects.create(claimed=True)
    Errand.objects.create(claimed=True, leased_until=ago(minutes=-5))
    Errand.objects.create(claimed=True, leased_until=ago(minutes=5))
    Errand.objects.create()
    run = marking(the.ignore)
    assert answers(run, only=("in_doubt",)) == {"in_doubt": 1}
    (row,) = pages(run, "in_doubt")
    assert row.pk == left.pk
    assert reason(run, left).startswith("it is in doubt: its claim was never settled")


# --- caps and time limits


def test_counting_stops_at_a_number() -> None:
    the.errands(5)
    run = the.transactional(the.ignore)
    found = ask(run, most=3)
    assert (found["pending"].value, found["pending"].how) == (3, "more than")
    exact = ask(run, most=5)["pending"]
    assert (exact.value, exact.how) == (5, "exact")


@pytest.mark.parametrize("since", ["claimed_at", F("claimed_at")], ids=["column", "expression"])
def test_the_oldest_of_the_first_rows_is_an_answer(since: Any) -> None:
    for minutes in (20, 40, 60, 80, 100):
        Errand.objects.create(claimed_at=ago(minutes=minutes))
    run = the.transactional(the.ignore, pending_since=since)
    found = ask(run, most=3)["oldest"]
    assert (seconds(found), found.how, round(found.least, -1)) == (4800, "more than", 4800)
    assert (seconds(ask(run)["oldest"]), ask(run)["oldest"].how) == (6000, "exact")


if connection.vendor == "postgresql":

    def test_counting_looks_at_no_more_rows_than_it_counts() -> None:
        the.errands(2000)
        # By statistics of a table with a few rows the planner would sort all of them.
        connection.cursor().execute("ANALYZE tests_errand")
        where = "CASE WHEN done THEN false ELSE nextval('tests_seen') > 0 END"
        run = the.transactional(the.ignore, pending=lambda: the.PENDING.extra(where=[where]))  # noqa: S610
        with temporary("CREATE SEQUENCE tests_seen", "DROP SEQUENCE tests_seen"):
            ask(run, most=3)
            with connection.cursor() as cursor:
                cursor.execute("SELECT last_value FROM tests_seen")
                [(seen,)] = cursor.fetchall()
        assert 3 < seen < 100


class Slow(Func):
    """A condition that takes longer than any limit of a test."""

    arity = 0
    output_field = IntegerField()
    template = "(SELECT 1 FROM pg_sleep(60))"

    def as_mysql(self, compiler: Any, connection: Any, **context: Any) -> Any:
        return self.as_sql(compiler, connection, template="SLEEP(60)", **context)


# SQLite has no limit.
if connection.vendor != "sqlite":

    def slow() -> Any:
        return Errand.objects.alias(slow=Slow()).filter(done=False, slow=1)

    @pytest.mark.parametrize("limit", [0.0, 0.2])
    def test_a_question_that_takes_too_long_is_unknown_and_the_others_are_answered(
        limit: float,
    ) -> None:
        """The database ends it, and the session is as before."""
        the.errands(2)
        run = the.transactional(the.ignore, pending=slow, failed={"dead": True})
        before = time_limits()
        found = ask(run, seconds=limit, only=("pending", "given_up"))
        assert found["pending"] == Answer(None, "unknown", f"not within {limit:g} s")
        assert limit == 0 or found["given_up"].value == 0
        assert time_limits() == before
        assert not connection.in_atomic_block
        assert Errand.objects.count() == 2

    def test_inside_a_transaction_the_limit_ends_with_the_question() -> None:
        run = the.transactional(the.ignore, pending=slow)
        with transaction.atomic():
            the.errands(2)
            before = time_limits()
            assert ask(run, seconds=0.2, only=("pending",))["pending"].how == "unknown"
            assert answers(the.transactional(the.ignore), only=("pending",)) == {"pending": 2}
            assert time_limits() == before
        assert Errand.objects.count() == 2


def test_a_question_takes_no_write_lock() -> None:
    """With the settings that Django recommends for SQLite, each transaction begins with one."""
    the.errands(1)
    is_sqlite = connection.vendor == "sqlite"
    found: list[Any] = []

    def pending() -> Any:
        return Errand.objects.filter(done=False)

    def question(_: Any) -> Any:
        # In the middle of the question another session writes.
        found.append(the.elsewhere(lambda: Errand.objects.update(result="written")))
        return Answer(1)

    with connected({"transaction_mode": "IMMEDIATE", "timeout": 0.2} if is_sqlite else {}):
        asker = Asker(the.transactional(the.ignore, pending=pending))
        assert asker.ask(question) == Answer(1)
        assert found == [1]

        def answered() -> Any:
            return ask(the.transactional(the.ignore), only=("pending",))["pending"]

        with transaction.atomic():
            Errand.objects.update(result="at work")
            assert the.elsewhere(answered) == Answer(1)


FAILURES: dict[str, dict[str, Any]] = {
    "a constant": {"failed": {"dead": True}},
    "the result": {"failed": {"dead": True}, "done": lambda row, result: {"done": True}},
    "nothing": {"failed": None},
}


@pytest.mark.parametrize("options", FAILURES.values(), ids=FAILURES)
def test_a_row_that_a_person_has_settled_is_no_longer_given_up(options: dict[str, Any]) -> None:
    """To put it back would repeat its work."""
    the.errands(3)
    fail = the.raising(ValueError("no such place"))
    run = the.transactional(fail, retry=the.retry(max_attempts=1), **options)
    assert run().failed == 3
    assert answers(run)["given_up"] == 3
    # The retry columns stay as the last failure has written them.
    Errand.objects.update(done=True, dead=False)
    assert answers(run)["given_up"] == 0
    assert not ask(run)["given_up"].why


@pytest.mark.parametrize("failed", [{"dead": True}, {"dead": True, "result": "no"}])
def test_a_row_with_a_dead_letter_that_was_handled_since_is_not_given_up(
    failed: dict[str, Any],
) -> None:
    """It was put back by hand, or by a reset that leaves the dead letter, and succeeded then."""
    the.errands(2)
    options = {"pending": Errand.objects.filter(done=False, claimed=False), "failed": failed}
    run = the.transactional(the.ignore, **options)
    Errand.objects.update(**failed)
    row = Errand.objects.latest("pk")
    Errand.objects.filter(pk=row.pk).update(done=True)
    assert answers(run)["given_up"] == 1
    shown = known(run, row)
    assert shown.parts["given_up"] is False
    assert shown.reason == "it is not in pending: it is done, or does not wait yet"


def test_a_claimed_row_is_not_given_up_whatever_it_still_contains() -> None:
    """Its dead letter is from before: a person has put it back, and a worker has begun with it."""
    run = the.at_most_once(the.ignore, failed={"dead": True})
    Errand.objects.create(dead=True, claimed=True)
    Errand.objects.create(dead=True, claimed=True, claimed_at=ago(seconds=1))
    assert answers(run)["given_up"] == 1


def test_a_claimed_row_without_a_time_is_not_shown_as_done() -> None:
    run = the.at_most_once(the.ignore, claimed_at=None, failed={"dead": True})
    row = Errand.objects.create(claimed=True)
    words = "it is not in pending: it is claimed, done, or does not wait yet"
    assert reason(run, row) == words


def test_the_age_of_pending_rows_without_a_time_is_unknown() -> None:
    """A monitor that asks for it must not be green."""
    the.errands(2)
    run = the.transactional(the.ignore, pending_since="claimed_at")
    assert ask(run)["oldest"].how == "unknown"
    Errand.objects.filter(place=0).update(claimed_at=ago(minutes=5))
    assert seconds(ask(run)["oldest"]) == 300
    Errand.objects.update(done=True)
    assert ask(run)["oldest"].how == "exact"


# --- one row


def known(run: BatchProcessor[Any], row: Any) -> Row:
    found = show(run, row.pk).value
    assert found is not None
    return found


def reason(run: BatchProcessor[Any], row: Any) -> str:
    return known(run, row).reason


def test_why_a_row_is_handled_or_not() -> None:
    run = the.at_least_once(
        the.ignore,
        retry=the.retry(max_attempts=3),
        failed={"dead": True},
        pending_since="claimed_at",
    )
    make, soon = Errand.objects.create, datetime(2999, 1, 2, 3, 4, 5, tzinfo=UTC)
    free = "the next run takes it, unless another session has locked it"
    assert reason(run, make()) == free
    assert reason(run, make(attempts=3)) == free  # to write its dead letter
    assert reason(run, make(done=True)) == "it is not in pending: it is done, or does not wait yet"
    waits = make(next_attempt_at=soon)
    assert reason(run, waits) == "its next attempt is at 2999-01-02 03:04:05 UTC"
    leased = make(leased_until=soon)
    assert reason(run, leased) == "a worker has claimed it, and may be at work"
    dead = make(dead=True, attempts=3, last_error="OSError: no\nroute")
    assert reason(run, dead) == "it was given up on: OSError: no route"
    shown = known(run, waits)
    assert [name for name, is_in in shown.parts.items() if is_in] == ["pending", "later"]
    assert list(shown.columns) == [
        "attempts",
        "next_attempt_at",
        "last_error",
        "leased_until",
        "claimed_at",
    ]
    missing = show(run, 0)
    assert (missing.value, missing.how) == (None, "exact")


# --- discard


def test_discard_gives_up_on_what_is_pending_or_claimed_and_on_nothing_else() -> None:
    retry = the.retry()
    run = the.at_most_once(the.ignore, retry=retry, reset={"claimed": False}, failed={"dead": True})
    pending = Errand.objects.create(attempts=2, next_attempt_at=ago(minutes=-5))
    claimed = Errand.objects.create(claimed=True, claimed_at=ago(minutes=5))
    done = Errand.objects.create(done=True)
    assert run.discard(Errand.objects.all(), reason="the customer\x00 has left") == 2
    assert the.state(pending) == {**the.state(claimed), "attempts": 2, "claimed": False}
    assert (the.state(claimed)["dead"], the.state(claimed)["claimed_at"]) == (True, False)
    assert the.untouched(done) is False
    assert not the.state(done)["dead"]
    fresh = Errand.objects.get(pk=pending.pk)
    assert fresh.last_error == "Discard: the customer has left"
    assert fresh.next_attempt_at is None
    assert ask(run)["given_up"].value == 2
    assert run.discard(Errand.objects.all()) == 0


# --- what only PostgreSQL is asked for


def test_the_doctor_examines_each_database() -> None:
    found = {each.check: each.level for each in examine([the.transactional(the.ignore)])}
    assert (found["flip"], found["router"]) == (Level.OK, Level.OK)
    of_postgresql = {"snapshot", "idle-in-transaction"}
    assert (connection.vendor == "postgresql") == (of_postgresql <= {*found})


def test_explain_is_for_postgresql_alone() -> None:
    run = the.transactional(the.ignore)
    if connection.vendor == "postgresql":
        assert explanation(run).plan is not None
        return
    words = f"expected PostgreSQL for explain, got {connection.display_name}; read the plan"
    with pytest.raises(Unsupported, match=words):
        explanation(run)
