"""What an error in a settlement, or in the claim after it, does to the other."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connection

from tests.contract.support import errands as the
from tests.contract.support.messages import SENDS_SEVERAL
from tests.contract.support.reports import assert_run
from tests.contract.support.temporary import at_update, temporary
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


def claims(place: int) -> str:
    """Recognise the update that claims the row of the place."""
    marked = "(NEW.claimed OR NEW.leased_until IS NOT NULL)"
    return f"NEW.place = {place} AND {marked} AND NOT NEW.done"


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
    assert the.places(done=True) == [0, 1, 3]
    assert the.state(rows[2])["done"] is False


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
    assert sorted(handled) == [0, 1, 2, 3]
    assert the.places(done=True) == [-1, 0, 2, 3]


@the.each_delivery
@pytest.mark.parametrize("statement", ["settlement", "claim"])
def test_an_interrupt_in_the_message_loses_no_settlement(make: the.Make, statement: str) -> None:
    """The driver cancels the message, so that the row is settled by a statement of its own."""
    the.errands(4)
    handled: list[int] = []
    condition = "NEW.place = 1 AND NEW.done" if statement == "settlement" else claims(2)
    with (
        at_update(condition, "PERFORM pg_sleep(60)", times=1),
        the.meanwhile(interrupt_sleeper),
        pytest.raises(KeyboardInterrupt) as error,
    ):
        make(recording(handled))()
    report = error.value.report  # type: ignore[attr-defined]  # as documented
    assert handled == [0, 1]
    assert the.places(done=True) == [0, 1]
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
    with at_update(claims(2), "RAISE EXCEPTION 'refused'"):
        assert_run(make(the.ignore, pending=spanning)(), processed=3, failed=1)
    assert the.places(done=True) == [0, 1, 3]


SPANNING = the.PENDING.filter(pk__in=the.PENDING.values("pk"))


@the.each_delivery
def test_a_row_of_a_spanning_question_is_settled_once_no_other_session_has_it_locked(
    make: the.Make,
) -> None:
    the.errands(2)
    other: Any = connection.copy()
    other.set_autocommit(False)

    def lock(row: Errand) -> None:
        if row.place == 0:
            with other.cursor() as cursor:
                cursor.execute("SELECT 1 FROM tests_errand WHERE id = %s FOR UPDATE", [row.pk])

    def release(execute: Callable[..., Any], sql: str, *rest: Any) -> Any:
        result = execute(sql, *rest)
        if sql.startswith("WITH dcl_mine"):
            other.rollback()
        return result

    try:
        with connection.execute_wrapper(release):
            assert_run(make(lock, pending=SPANNING)(), processed=2)
    finally:
        other.close()
    assert the.places(done=True) == [0, 1]


@the.each_delivery
def test_a_row_of_a_spanning_question_that_was_taken_over_is_lost(make: the.Make) -> None:
    the.errands(2)

    def take_over(row: Errand) -> None:
        if row.place == 0:
            mine = Errand.objects.filter(pk=row.pk)
            the.elsewhere(lambda: mine.update(leased_until=None, claimed_at=None))

    assert_run(make(take_over, pending=SPANNING)(), processed=1, lease_lost=1)
    assert the.places(done=True) == [1]


# --- code of others that is called between two rows, or for each statement


def with_context(execute: Callable[..., Any], sql: str, params: Any, *rest: Any) -> Any:
    """Send a setting with each write, as libraries do that record who has changed a row.

    It expects one statement, whose result it leaves the cursor at.
    """
    if sql.startswith(("UPDATE", "WITH")):
        sql = f"SELECT set_config('tests.context', %s, true); {sql}"
        params = ("user 7", *(params or ()))
    cursor = execute(sql, params, *rest)
    while cursor is not None and cursor.nextset():
        pass
    return cursor


@pytest.fixture
def _observed() -> Iterator[None]:
    with connection.execute_wrapper(with_context):
        yield


observed = pytest.mark.usefixtures("_observed")


@observed
@the.all_deliveries
@pytest.mark.parametrize("value", ["100%", "%s", "a%%b"])
def test_values_are_written_as_they_are(make: the.Make, value: str) -> None:
    the.errands(5)
    assert_run(make(the.ignore, done={"done": True, "result": value})(), processed=5)
    assert set(Errand.objects.values_list("result", flat=True)) == {value}
