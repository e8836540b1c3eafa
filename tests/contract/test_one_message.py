"""A flip and its COMMIT in one message: what comes in between, and what others add to it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection, transaction

from dcl_processor.sql.messages import send_together
from tests import seams
from tests.contract.support import errands as the
from tests.contract.support.reports import assert_run
from tests.contract.support.sessions import end_session
from tests.contract.support.temporary import at_update, execute
from tests.models import Errand
from tests.waiting import until

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

#: What drops a row in words that are not those of other triggers, so that flips still wait.
DROP = "RETURN CASE WHEN false THEN NEW END"


def test_a_callback_runs_before_the_next_row_is_claimed() -> None:
    rows = the.errands(4)
    seen: list[Any] = []

    def handle(row: Errand) -> None:
        seen.append(row.pk)

        def callback() -> None:
            done = the.elsewhere(lambda: Errand.objects.get(pk=row.pk).done)
            seen.append((row.pk, done, connection.in_atomic_block))

        transaction.on_commit(callback)

    assert the.transactional(handle)().processed == 4
    assert seen == [each for row in rows for each in (row.pk, (row.pk, True, False))]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the messages of several statements."""
    found = list[str]()

    def send(cursor: Any, statements: Any) -> list[Any]:
        found.append("; ".join([each.sql for each in statements]))
        return send_together(cursor, statements)

    seams.replace(monkeypatch, seams.SEND_TOGETHER, send)
    return found


def test_flips_that_differ_from_row_to_row_are_one_message(sent: list[str]) -> None:
    """Each of them still fails if it does not write its row."""
    rows = the.errands(20)
    run = the.transactional(lambda row: row.place, done=the.with_result, batch_size=10)
    assert run().processed == 20
    assert max(each.count(" SET ") for each in sent) == 10
    Errand.objects.update(done=False)
    with at_update("NEW.place = 2 AND NEW.done", DROP):
        report = run()
    assert (report.processed, report.failed, report.redone) == (19, 1, 10)
    assert report.failures[0].pk == rows[2].pk


def test_a_handler_that_has_committed_by_itself_is_not_taken_for_its_flip() -> None:
    """Its transaction is committed, and the session ends before the flip."""
    rows = the.errands(4)

    def handle(row: Errand) -> None:
        if row.place == 2:
            execute("COMMIT; BEGIN")
            end_session()

    report = the.transactional(handle)()
    assert_run(report, processed=3, failed=1)
    assert [failure.pk for failure in report.failures] == [rows[2].pk]
    assert the.places(done=False) == [2]


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
