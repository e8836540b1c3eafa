"""No flip is committed without the work, and none without the lock."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection, connections, transaction

from dcl_processor import batch_processor
from dcl_processor.exceptions import TransactionLost
from tests.models import Depot, Parcel

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


def run(handle: Callable[[Parcel], Any], **options: Any) -> Any:
    options = {"done": {"sent": True}, **options}
    return batch_processor(pending=Parcel.objects.filter(sent=False), **options)(handle)()


def work(row: Parcel) -> None:
    Parcel.objects.filter(pk=row.pk).update(note="worked")


def execute(sql: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(sql)


def reconnect() -> None:
    connection.close()
    connection.connect()


ENDS: dict[str, Callable[[], Any]] = {
    "raw rollback": lambda: execute("ROLLBACK"),
    "raw commit": lambda: execute("COMMIT"),
    "the driver's rollback": lambda: connection.connection.rollback(),  # noqa: PLW0108  # late
    "the driver's commit": lambda: connection.connection.commit(),  # noqa: PLW0108  # late
    "a new connection": reconnect,
}
if connection.vendor == "mysql":
    ENDS["a table made"] = lambda: execute("CREATE TABLE tests_fence (a int)")


@pytest.fixture(autouse=True)
def _no_table() -> Any:
    yield
    if connection.vendor == "mysql":
        execute("DROP TABLE IF EXISTS tests_fence")


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_a_handler_that_ends_the_transaction_gets_no_flip(
    end: Callable[[], Any], batch_size: int
) -> None:
    Parcel.objects.bulk_create([Parcel(), Parcel()])

    def handle(row: Parcel) -> None:
        work(row)
        end()

    report = run(handle, batch_size=batch_size)
    assert (report.processed, report.failed) == (0, 2)
    assert not Parcel.objects.filter(sent=True).exists()
    assert not connection.in_atomic_block


def test_what_ended_the_transaction_is_said() -> None:
    Parcel.objects.create()
    report = run(lambda row: execute("ROLLBACK"))
    [failure] = report.failures
    assert isinstance(failure.error, TransactionLost)
    assert "leave COMMIT, ROLLBACK and DDL out of the handler" in str(failure.error)


def test_a_statement_after_the_end_does_not_hide_it() -> None:
    """The statement opens a new transaction by itself."""
    Parcel.objects.create()

    def handle(row: Parcel) -> None:
        execute("ROLLBACK")
        Depot.objects.count()

    assert run(handle).failed == 1


def test_a_wrapper_that_the_handler_leaves_behind_costs_nobody_anything() -> None:
    Parcel.objects.bulk_create([Parcel(), Parcel()])
    left: list[Any] = []

    def wrapper(execute: Any, *args: Any) -> Any:
        return execute(*args)

    def handle(row: Parcel) -> None:
        connection.execute_wrappers.append(wrapper)
        left.append(wrapper)

    assert run(handle).processed == 2
    assert connection.execute_wrappers == left
    connection.execute_wrappers.clear()


if connection.features.has_select_for_update:

    def test_a_question_that_needs_no_statement_loses_no_transaction() -> None:
        """Django does not send a query that can have no answer, and opens no transaction for it."""
        keys = [Parcel.objects.create().pk]
        tried: list[str] = []

        def pending() -> Any:
            return Parcel.objects.filter(pk__in=list(keys))

        with transaction.atomic(using="other"):
            Parcel.objects.using("other").select_for_update().get()

            def look(execute: Any, sql: str, *args: Any) -> Any:
                result = execute(sql, *args)
                if tried or "SKIP LOCKED" in sql:
                    tried.append(sql)
                if len(tried) == 3:  # the lock, the next window, and the look at what was locked
                    keys.clear()  # from here on nothing can be pending
                return result

            with connection.execute_wrapper(look):
                report = batch_processor(pending=pending, repeats=True)(work)(wait_for_locked=0.2)
        assert (report.processed, report.failed) == (0, 0)


if connection.vendor == "mysql":

    def call_procedure(depot: Depot) -> None:
        with connection.cursor() as cursor:
            cursor.callproc("tests_rename", [depot.pk])

    def driver_cursor(depot: Depot) -> None:
        cursor = connection.connection.cursor()
        cursor.execute("UPDATE tests_depot SET name = 'us' WHERE id = %s", [depot.pk])

    def orm(depot: Depot) -> None:
        Depot.objects.filter(pk=depot.pk).update(name="us")

    @pytest.mark.parametrize("touch", [call_procedure, driver_cursor, orm])
    def test_a_deadlock_that_the_handler_swallowed_costs_the_flip(
        touch: Callable[[Depot], None],
    ) -> None:
        """InnoDB rolls back the whole transaction of the session that has changed less."""
        Parcel.objects.create()
        ours, theirs = Depot.objects.create(), Depot.objects.create()
        Depot.objects.bulk_create([Depot(name="many") for _ in range(300)])
        execute("DROP PROCEDURE IF EXISTS tests_rename")
        execute(
            "CREATE PROCEDURE tests_rename(IN i bigint)"
            " UPDATE tests_depot SET name = 'us' WHERE id = i"
        )
        has_theirs = threading.Event()

        def opponent() -> None:
            with transaction.atomic(using="other"):
                depots = Depot.objects.using("other")
                depots.filter(name="many").update(open=False)
                depots.filter(pk=theirs.pk).update(name="them")
                has_theirs.set()
                depots.filter(pk=ours.pk).update(name="them")
            connections["other"].close()

        thread = threading.Thread(target=opponent)

        def handle(row: Parcel) -> None:
            work(row)
            Depot.objects.filter(pk=ours.pk).update(name="us")
            thread.start()
            assert has_theirs.wait(30)
            with pytest.raises(Exception, match="Deadlock"):
                touch(theirs)

        report = run(handle)
        thread.join(30)
        assert (report.processed, report.failed) == (0, 1)
        assert list(Parcel.objects.values_list("sent", "note")) == [(False, "")]
