"""An interrupt in a settlement, and values that code of others sends on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection

from tests.contract.support import errands as the
from tests.contract.support.reports import assert_run
from tests.contract.support.temporary import at_update
from tests.models import Errand
from tests.waiting import until

pytestmark = pytest.mark.django_db(transaction=True)


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
        make(lambda row: handled.append(row.place))()
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


@the.all_deliveries
@pytest.mark.parametrize("value", ["100%", "%s", "a%%b"])
def test_values_are_written_as_they_are(make: the.Make, value: str) -> None:
    the.errands(5)
    with connection.execute_wrapper(with_context):
        assert_run(make(the.ignore, done={"done": True, "result": value})(), processed=5)
    assert set(Errand.objects.values_list("result", flat=True)) == {value}
