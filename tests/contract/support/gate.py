"""A gate inside a statement, between its snapshot and its lock.

PostgreSQL takes a statement's snapshot first and its row locks last, and evaluates the predicate
in between. There a volatile function waits for an advisory lock that the test holds: the only way
to have another session commit at that very point. The locks of other databases cannot be reached
from a predicate (InnoDB locks a row when it reads it, SQLite the whole file beforehand), so there
the other session commits just before the lock statement is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from django.db import connection, connections

from tests.contract.support.errands import answer, meanwhile
from tests.contract.support.messages import updates
from tests.waiting import until

T = TypeVar("T")

HAS_ROW_LOCKS = connection.features.has_select_for_update
HAS_GATE = connection.vendor == "postgresql"

#: The advisory lock's key, of no meaning.
KEY = 20_011

INSTALL_GATE = f"""
    CREATE OR REPLACE FUNCTION tests_gate() RETURNS boolean VOLATILE LANGUAGE plpgsql AS $$
    BEGIN
        PERFORM pg_advisory_lock_shared({KEY});
        PERFORM pg_advisory_unlock_shared({KEY});
        RETURN true;
    END $$
"""


def other_than(using: str) -> str:
    """Return the alias of a session that has no part in a run on ``using``."""
    return "default" if using == "other" else "other"


def run_and_meanwhile(
    run: Callable[[], T], act: Callable[[], None], *, using: str = "default", at: int = 0
) -> T:
    """Run, and act while the lock statement number ``at`` has its snapshot and not its lock.

    ``using``: the alias of the run, which ``act`` leaves alone.
    """
    if HAS_GATE:
        return _run_through_the_gate(run, act, using, at)
    with before_lock(act, using=using, at=at):
        return run()


@contextmanager
def before_lock(act: Callable[[], None], *, using: str = "default", at: int = 0) -> Iterator[None]:
    """Act just before the lock statement number ``at`` is sent."""
    errors: list[Exception] = []

    def then(sql: str) -> str:
        # Raised here, it would pass for an error of the run's own statement.
        try:
            act()
        except Exception as error:  # noqa: BLE001  # raised again below
            errors.append(error)
        return sql

    with _at_lock(using, at, then):
        yield
    if errors:
        raise errors[0]


def _is_lock(sql: str) -> bool:
    if HAS_ROW_LOCKS:
        # A handler's own lock waits.
        is_ours = " SKIP LOCKED" in sql or " NOWAIT" in sql
        return " UPDATE" in sql and is_ours and not updates(sql)
    return sql.startswith("UPDATE") and sql.endswith("WHERE 1 = 0")


@contextmanager
def _at_lock(using: str, at: int, then: Callable[[str], str]) -> Iterator[None]:
    sent: list[str] = []

    def wrapper(execute: Callable[..., Any], sql: str, *args: Any) -> Any:
        if _is_lock(sql):
            sent.append(sql)
            if len(sent) == at + 1:
                sql = then(sql)
        return execute(sql, *args)

    with connections[using].execute_wrapper(wrapper):
        yield
    assert len(sent) > at, f"expected lock statement number {at}, got {sent}"


def _run_through_the_gate(run: Callable[[], T], act: Callable[[], None], using: str, at: int) -> T:
    def suspended() -> T:
        with _at_lock(using, at, _put_the_gate_in):
            return run()

    with connections[other_than(using)].cursor() as cursor:
        cursor.execute("SELECT pg_advisory_lock(%s)", [KEY])
        with meanwhile(suspended) as results:
            try:
                if _somebody_is_at_the_gate(cursor, results):
                    act()
            finally:
                cursor.execute("SELECT pg_advisory_unlock(%s)", [KEY])
    result: T = answer(results)
    return result


def _put_the_gate_in(sql: str) -> str:
    predicate, lock, way = sql.rpartition(" FOR NO KEY UPDATE")
    # A claim that may choose has an order, and ends with it.
    predicate, order, by = predicate.partition(" ORDER BY")
    return f"{predicate} AND tests_gate(){order}{by}{lock}{way}"


def _somebody_is_at_the_gate(cursor: Any, results: list[Any]) -> bool:
    """Wait for it; False when the run ended without coming there, and has an error to tell."""
    is_there = False

    def came_or_ended() -> bool:
        nonlocal is_there
        cursor.execute(
            "SELECT count(*) FROM pg_locks JOIN pg_database ON pg_database.oid = database"
            " WHERE locktype = 'advisory' AND objid = %s AND NOT granted"
            " AND datname = current_database()",
            [KEY],
        )
        is_there = bool(cursor.fetchone()[0])
        return is_there or bool(results)

    until(came_or_ended, "the run to come to the gate", 0.001)
    return is_there
