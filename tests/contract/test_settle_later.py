"""A settlement that is sent with the next claim: what an error in their message does to both."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection

from dcl_processor import Snooze
from dcl_processor.exceptions import StillPending
from tests.contract.support import errands as the
from tests.contract.support.messages import SENDS_SEVERAL
from tests.contract.support.reports import assert_run
from tests.contract.support.temporary import temporary
from tests.models import Errand
from tests.waiting import until

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(not SENDS_SEVERAL, reason="the driver sends one statement at a time"),
]


def recording(handled: list[int], act: Callable[[Errand], Any] = the.ignore) -> Any:
    """Return a handler that records the rows it handles, by their place."""

    def handle(row: Errand) -> None:
        handled.append(row.place)
        act(row)

    return handle


def places(**values: Any) -> list[int]:
    return list(Errand.objects.filter(**values).order_by("place").values_list("place", flat=True))


def at_update(name: str, condition: str, action: str, *, when: str = "BEFORE") -> Any:
    """Do something in each update for which the condition holds."""
    return temporary(
        f"CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN IF {condition} THEN {action}; END IF; RETURN NEW; END $$; "
        f"CREATE TRIGGER {name} {when} UPDATE ON tests_errand "
        f"FOR EACH ROW EXECUTE FUNCTION {name}()",
        f"DROP TRIGGER {name} ON tests_errand; DROP FUNCTION {name}",
    )


@the.each_delivery
def test_a_row_that_another_worker_has_taken_over_is_lost_alone(make: the.Make) -> None:
    rows = the.errands(4)

    def take_over(row: Errand) -> None:
        if row.place == 2:
            mine = Errand.objects.filter(pk=row.pk)
            the.elsewhere(lambda: mine.update(leased_until=None, claimed_at=None))

    handled: list[int] = []
    assert_run(make(recording(handled, take_over))(), processed=3, lease_lost=1)
    assert handled == [0, 1, 2, 3]
    assert places(done=True) == [0, 1, 3]
    assert the.state(rows[2])["done"] is False


@the.each_delivery
def test_a_row_that_its_handler_deletes_is_processed(make: the.Make) -> None:
    the.errands(4)
    assert_run(make(lambda row: row.delete() if row.place == 2 else None)(), processed=4)
    assert places(done=True) == [0, 1, 3]


@the.each_delivery
@pytest.mark.parametrize("when", ["BEFORE", "AFTER"])
def test_a_settlement_that_fails_takes_no_claim_with_it(make: the.Make, when: str) -> None:
    rows = the.errands(4)
    handled: list[int] = []
    refused = at_update(
        "tests_refuse", "NEW.place = 2 AND NEW.done", "RAISE EXCEPTION 'refused'", when=when
    )
    with refused:
        report = make(recording(handled))()
    assert_run(report, processed=3, failed=1)
    assert [failure.pk for failure in report.failures] == [rows[2].pk]
    assert "refused" in str(report.failures[0].error)
    assert handled == [0, 1, 2, 3]
    assert places(done=True) == [0, 1, 3]


@the.each_delivery
def test_a_settlement_that_fails_at_the_commit_takes_no_claim_with_it(make: the.Make) -> None:
    """A deferred constraint is checked at the COMMIT that the two statements share."""
    rows = the.errands(4)
    handled: list[int] = []
    Errand.objects.create(place=-1, done=True, claimed=True)
    with temporary(
        "ALTER TABLE tests_errand ADD CONSTRAINT tests_same EXCLUDE (abs(place) WITH =) "
        "WHERE (done AND place IN (-1, 1)) DEFERRABLE INITIALLY DEFERRED",
        "ALTER TABLE tests_errand DROP CONSTRAINT tests_same",
    ):
        report = make(recording(handled))()
    assert_run(report, processed=3, failed=1)
    assert [failure.pk for failure in report.failures] == [rows[1].pk]
    assert handled == [0, 1, 2, 3]
    assert places(done=True) == [-1, 0, 2, 3]


@the.each_delivery
def test_a_claim_that_fails_takes_no_settlement_with_it(make: the.Make) -> None:
    """Once: the row is claimed by a statement of its own after it."""
    the.errands(4)
    handled: list[int] = []
    claims = "NEW.place = 2 AND (NEW.claimed OR NEW.leased_until IS NOT NULL) AND NOT NEW.done"
    with (
        temporary("CREATE SEQUENCE tests_once", "DROP SEQUENCE tests_once"),
        at_update(
            "tests_once_only",
            f"{claims} AND nextval('tests_once') = 1",
            "RAISE EXCEPTION 'refused once'",
        ),
    ):
        assert_run(make(recording(handled))(), processed=4)
    assert handled == [0, 1, 2, 3]
    assert places(done=True) == [0, 1, 2, 3]


@the.each_delivery
@pytest.mark.parametrize("statement", ["settlement", "claim"])
def test_a_session_that_ends_in_the_message_repeats_no_work(make: the.Make, statement: str) -> None:
    the.errands(5)
    handled: list[int] = []
    claims = "NEW.place = 3 AND (NEW.claimed OR NEW.leased_until IS NOT NULL) AND NOT NEW.done"
    condition = "NEW.place = 2 AND NEW.done" if statement == "settlement" else claims
    with (
        temporary("CREATE SEQUENCE tests_once", "DROP SEQUENCE tests_once"),
        at_update(
            "tests_cut",
            f"{condition} AND nextval('tests_once') = 1",
            "PERFORM pg_terminate_backend(pg_backend_pid())",
        ),
    ):
        assert_run(make(recording(handled))(), processed=5, passes=1)
    assert sorted(handled) == [0, 1, 2, 3, 4]
    assert places(done=True) == [0, 1, 2, 3, 4]


@the.each_delivery
def test_a_lock_on_a_row_that_is_to_be_settled_is_waited_for(make: the.Make) -> None:
    """The server gives up on the lock twice."""
    the.errands(4)
    handled: list[int] = []
    with (
        temporary("CREATE SEQUENCE tests_once", "DROP SEQUENCE tests_once"),
        at_update(
            "tests_wait",
            "NEW.place = 1 AND NEW.done AND nextval('tests_once') < 3",
            "RAISE EXCEPTION USING ERRCODE = 'lock_not_available', MESSAGE = 'locked'",
        ),
    ):
        assert_run(make(recording(handled))(), processed=4)
    assert sorted(handled) == [0, 1, 2, 3]
    assert places(done=True) == [0, 1, 2, 3]


@the.each_delivery
def test_outcomes_other_than_success_are_settled_at_once(make: the.Make) -> None:
    """Before the next row is claimed, so that their columns are those of one settlement."""
    the.errands(6)
    seen: list[dict[str, Any]] = []
    options: dict[str, Any] = {"retry": the.retry(backoff=3600)}
    if make is the.at_most_once:
        options["reset"] = {"claimed": False}

    def handle(row: Errand) -> None:
        if row.place in (3, 5):
            seen.append(the.elsewhere(lambda: the.state(Errand.objects.get(place=row.place - 1))))
        if row.place == 2:
            raise Snooze(delay=3600)
        if row.place == 4:
            raise ValueError("no")

    assert_run(make(handle, **options)(), processed=4, snoozed=1, failed=1, retried=1)
    assert places(done=True) == [0, 1, 3, 5]
    assert [each["attempts"] for each in seen] == [0, 1]
    assert not any(each["claimed"] or each["leased_until"] for each in seen)


@the.each_delivery
@pytest.mark.parametrize("statement", ["settlement", "claim"])
def test_an_interrupt_in_the_message_loses_no_settlement(make: the.Make, statement: str) -> None:
    """The driver cancels the message, so that the row is settled by a statement of its own."""
    the.errands(4)
    handled: list[int] = []
    claims = "NEW.place = 2 AND (NEW.claimed OR NEW.leased_until IS NOT NULL) AND NOT NEW.done"
    condition = "NEW.place = 1 AND NEW.done" if statement == "settlement" else claims
    with (
        temporary("CREATE SEQUENCE tests_once", "DROP SEQUENCE tests_once"),
        at_update(
            "tests_sleep", f"{condition} AND nextval('tests_once') = 1", "PERFORM pg_sleep(60)"
        ),
        the.meanwhile(interrupt_sleeper),
        pytest.raises(KeyboardInterrupt) as error,
    ):
        make(recording(handled))()
    report = error.value.report  # type: ignore[attr-defined]  # as documented
    assert handled == [0, 1]
    assert places(done=True) == [0, 1]
    assert report.processed == 2
    assert all(map(the.untouched, Errand.objects.filter(place__gt=1)))


def interrupt_sleeper() -> None:
    """Interrupt this process, as Ctrl-C does, when a session of it sleeps."""
    sleeps = (
        "SELECT count(*) FROM pg_stat_activity "
        "WHERE wait_event = 'PgSleep' AND datname = current_database()"
    )
    with connection.cursor() as cursor:

        def is_asleep() -> bool:
            cursor.execute(sleeps)
            return bool(cursor.fetchone()[0])

        until(is_asleep, "a session to come to its sleep")
    os.kill(os.getpid(), signal.SIGINT)


@the.each_delivery
def test_a_settlement_is_not_written_in_the_transaction_of_a_claim(make: the.Make) -> None:
    """A claim of several statements, which fails here, would take the settlement back."""
    the.errands(4)
    spanning = the.PENDING.filter(pk__in=the.PENDING.values("pk"))
    claims = "NEW.place = 2 AND (NEW.claimed OR NEW.leased_until IS NOT NULL) AND NOT NEW.done"
    with at_update("tests_refuse", claims, "RAISE EXCEPTION 'refused'"):
        assert_run(make(the.ignore, pending=spanning)(), processed=3, failed=1)
    assert places(done=True) == [0, 1, 3]


def test_a_flip_that_has_to_be_checked_does_not_wait() -> None:
    """It depends on the row, and leaves one row pending: that row fails."""
    rows = the.errands(4)
    run = the.at_least_once(the.ignore, done=lambda row: {"done": row.place != 2})
    report = run()
    assert_run(report, processed=3, failed=1)
    assert [failure.pk for failure in report.failures] == [rows[2].pk]
    assert isinstance(report.failures[0].error, StillPending)
    assert places(done=True) == [0, 1, 3]
