"""Connections whose default would make the second check read an old snapshot."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.db import connection, transaction
from django.db.backends.postgresql.psycopg_any import IsolationLevel

from dcl_processor import BatchProcessor, batch_processor
from dcl_processor.exceptions import Unsupported
from tests.contract.support.reports import assert_run
from tests.contract.support.sessions import before_statement, connected
from tests.models import Depot, Parcel

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

# Every way in which a connection may come by another level than READ COMMITTED.
LEVELS: dict[str, list[dict[str, Any]]] = {
    "postgresql": [
        {},
        {"isolation_level": IsolationLevel.REPEATABLE_READ},  # each driver has its own numbers
        {"isolation_level": IsolationLevel.SERIALIZABLE},
        {"options": "-c default_transaction_isolation=serializable"},
        {"options": "-c default_transaction_isolation=repeatable\\ read"},
    ],
    "mysql": [{}, {"isolation_level": "repeatable read"}, {"isolation_level": "serializable"}],
    "sqlite": [{}, {"transaction_mode": "IMMEDIATE"}, {"transaction_mode": "EXCLUSIVE"}],
}
options = pytest.mark.parametrize("options", LEVELS[connection.vendor], ids=str)


def processor(calls: list[Any]) -> BatchProcessor[Parcel]:
    """Ask a spanning question: the flag that counts is the depot's."""

    @batch_processor(
        pending=lambda: Parcel.objects.filter(sent=False, depot__open=True), done={"sent": True}
    )
    def send(row: Parcel) -> None:
        calls.append(sees_what_others_commit())

    return send


def sees_what_others_commit() -> bool:
    """Tell whether each statement of the running transaction has a snapshot of its own."""
    if not connection.features.has_select_for_update:
        return True  # SQLite: we hold the lock for writing, no session can commit anything
    before = Depot.objects.count()
    Depot.objects.using("other").create()
    return Depot.objects.count() == before + 1


def between_lock_and_question(sql: str) -> bool:
    """Recognise the second statement of a spanning claim: it joins, and reads whole rows."""
    whole = re.search(r"^SELECT \W?tests_parcel\W+id\W?, .* JOIN\W+tests_depot", sql)
    return bool(whole) and "UPDATE" not in sql


def close_depots() -> None:
    Depot.objects.using("other").update(open=False)


if connection.features.has_select_for_update:
    # On SQLite no session can commit between our lock and our question.

    @options
    def test_the_second_check_sees_what_was_committed_after_the_lock(
        options: dict[str, Any],
    ) -> None:
        Parcel.objects.create(depot=Depot.objects.create())
        calls: list[Any] = []
        with connected(options), before_statement(between_lock_and_question, close_depots):
            report = processor(calls)()
        assert_run(report, stale=1)
        assert calls == []


# What changes the level of the transactions that are yet to begin, in a handler.
CHANGES: dict[str, list[str]] = {
    "postgresql": [
        "SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL REPEATABLE READ",
        "SET default_transaction_isolation = 'serializable'",
        "SELECT set_config('default_transaction_isolation', 'repeatable read', false)",
    ],
    "mysql": ["SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ"],
    "sqlite": [],
}

if connection.features.has_select_for_update:

    @pytest.mark.parametrize("change", CHANGES[connection.vendor])
    def test_a_level_that_a_handler_changes_is_not_that_of_the_next_claim(change: str) -> None:
        depots = [Depot.objects.create(), Depot.objects.create()]
        Parcel.objects.bulk_create([Parcel(depot=depot) for depot in depots])
        calls: list[Any] = []

        @batch_processor(
            pending=lambda: Parcel.objects.filter(sent=False, depot__open=True),
            done={"sent": True},
        )
        def send(row: Parcel) -> None:
            calls.append(row.depot_id)
            with connection.cursor() as cursor:
                cursor.execute(change)

        def second_question(sql: str) -> bool:
            return bool(calls) and between_lock_and_question(sql)

        try:
            with before_statement(second_question, close_depots):
                report = send()
        finally:
            connection.close()
        assert calls == [depots[0].pk]
        assert_run(report, processed=1, stale=1)

    def test_the_connections_own_level_is_given_back() -> None:
        levels: list[str] = []

        def level() -> str:
            with transaction.atomic(), connection.cursor() as cursor:
                cursor.execute(ASKS_LEVEL[connection.vendor])
                return str(cursor.fetchone()[0])

        with connected(LEVELS[connection.vendor][-1 if connection.vendor == "mysql" else 2]):
            before = level()
            Parcel.objects.create(depot=Depot.objects.create())
            assert_run(processor(levels)(), processed=1)
            assert level() == before


ASKS_LEVEL = {
    "postgresql": "SHOW transaction_isolation",
    "mysql": "SELECT @@session.tx_isolation",
}


def test_the_server_is_asked_at_most_once_per_connection() -> None:
    depot = Depot.objects.create()
    asked: list[str] = []

    def watch(execute: Any, sql: str, *args: Any) -> Any:
        if sql.startswith("SHOW"):
            asked.append(sql)
        return execute(sql, *args)

    run = processor([])
    vars(run)["process"] = lambda row: None  # ask nothing of our own
    connection.close()
    with connection.execute_wrapper(watch):
        for _ in range(3):
            Parcel.objects.create(depot=depot)
            Parcel.objects.create(depot=depot)
            assert_run(run(), processed=2)
    # PostgreSQL takes the level with each BEGIN.
    assert len(asked) == (1 if connection.vendor == "mysql" else 0)


def test_a_connection_without_autocommit_is_refused() -> None:
    with connected({}, autocommit=False) as wrapper:
        with pytest.raises(Unsupported, match=r"expected .* autocommit .* got AUTOCOMMIT=False"):
            processor([])()
        wrapper.rollback()
