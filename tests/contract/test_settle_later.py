"""An error or an interrupt in a settlement, and values that code of others sends on."""

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


@the.each_delivery
def test_a_settlement_that_fails_at_the_commit_takes_no_claim_with_it(make: the.Make) -> None:
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
def test_an_interrupt_in_the_message_loses_no_settlement(make: the.Make) -> None:
    """The driver cancels the message, so that the row is settled by a statement of its own."""
    the.errands(4)
    handled: list[int] = []
    with (
        at_update("NEW.place = 1 AND NEW.done", "PERFORM pg_sleep(60)", times=1),
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
