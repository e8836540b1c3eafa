"""Statements by which the database itself refuses one row at one kind of statement.

A trigger recognises the statement by what it writes, and a function in the question is asked where
rows are checked under their locks. A count that no rollback takes back ends faults that pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from threading import current_thread, main_thread
from typing import Any

from django.db import connection, connections
from django.db.backends.signals import connection_created

#: What an UPDATE writes at each stage.
WRITES = {
    "mark": "(NOT OLD.claimed AND NEW.claimed) OR (OLD.leased_until IS NULL AND "
    "NEW.leased_until IS NOT NULL AND NEW.last_error = OLD.last_error)",
    "flip": "NOT OLD.done AND NEW.done",
    "record": "NEW.last_error <> OLD.last_error AND NEW.last_error <> ''",
    "dead letter": "NOT OLD.dead AND NEW.dead",
    "put-back": "OLD.claimed AND NOT NEW.claimed AND NOT NEW.done",
    "renewal": "NEW.leased_until > OLD.leased_until AND NEW.attempts = OLD.attempts "
    "AND NEW.last_error = OLD.last_error",
}

#: What the function in the question looks for in a row.
ASKED = {"claim": "NOT done", "look": "done"}

#: The answers that are about the row: the same statement gets them in every run.
ABOUT_THE_ROW = ("unique", "check", "data", "trigger")


def _raised(state: str) -> str:
    return f"RAISE EXCEPTION USING ERRCODE = '{state}'"


def _signalled(state: str, number: int) -> str:
    return f"SIGNAL SQLSTATE '{state}' SET MYSQL_ERRNO = {number}, MESSAGE_TEXT = 'refused'"


#: What each database answers, and how a trigger makes it answer that.
ANSWERS: dict[str, str] = {
    "postgresql": {
        "unique": _raised("23505"),
        "check": _raised("23514"),
        "data": _raised("22003"),
        "trigger": "RAISE EXCEPTION 'refused'",
        "timeout": _raised("57014"),
        "cancel": "PERFORM pg_cancel_backend(pg_backend_pid()), pg_sleep(60)",
        "lock": _raised("55P03"),
        "deadlock": _raised("40P01"),
        "memory": _raised("53200"),
        "disk": _raised("53100"),
        "lost": "PERFORM pg_terminate_backend(pg_backend_pid()), pg_sleep(60)",
    },
    "mysql": {
        "unique": _signalled("23000", 1062),
        "check": _signalled("23000", 4025),
        "data": _signalled("22003", 1264),
        "trigger": "SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'refused'",
        "timeout": _signalled("70100", 1969),
        "cancel": "KILL QUERY CONNECTION_ID()",
        # A deadlock ends the transaction, which no trigger does.
        "lock": _signalled("HY000", 1205),
        "memory": _signalled("HY001", 1038),
        "disk": _signalled("HY000", 1021),
        "lost": "KILL CONNECTION_ID()",
    },
    "sqlite": {"trigger": "RAISE(ABORT, 'refused')", "cancel": "0"},
}.get(connection.vendor, {})


@contextmanager
def injected(stage: str, answer: str, place: int, times: int | None) -> Iterator[None]:
    """Refuse the row so many times, or for good."""
    _Count.asked = 0
    most = 10**9 if times is None else times
    make = {"postgresql": _postgresql, "mysql": _mariadb, "sqlite": _sqlite}[connection.vendor]
    with ExitStack() as stack:
        stack.enter_context(_functions(stage, answer, place, most))
        for there, back in make(stage, ANSWERS[answer], place, most):
            stack.callback(_execute, back)
            _execute(there)
        yield


def _execute(sql: str) -> Sequence[Any] | None:
    """Execute a statement on another connection; return the first row, if there is one."""
    try:
        with connections["other"].cursor() as cursor:
            cursor.execute(sql)
            return cursor.fetchone() if cursor.description else None
    finally:
        if current_thread() is not main_thread():
            connections["other"].close()


def _postgresql(stage: str, action: str, place: int, most: int) -> Iterator[tuple[str, str]]:
    yield "CREATE SEQUENCE tests_faults", "DROP SEQUENCE tests_faults"
    body = f"IF it = {place} AND nextval('tests_faults') <= {most} THEN {action}; END IF;"
    yield (
        (
            "CREATE FUNCTION tests_fault(it int) RETURNS void LANGUAGE plpgsql AS "
            f"$$BEGIN {body} END$$"
        ),
        "DROP FUNCTION tests_fault",
    )
    # A transaction without an id has locked nothing: that is the scan.
    asked = f"pg_current_xact_id_if_assigned() IS NOT NULL AND {ASKED.get(stage, 'false')}"
    body = f"IF {asked} THEN PERFORM tests_fault(it); END IF; RETURN NOT done;"
    yield (
        (
            "CREATE FUNCTION tests_pending(it int, done boolean) RETURNS boolean "
            f"LANGUAGE plpgsql AS $$BEGIN {body} END$$"
        ),
        "DROP FUNCTION tests_pending",
    )
    yield (
        (
            "CREATE FUNCTION tests_refuse() RETURNS trigger LANGUAGE plpgsql AS "
            "$$BEGIN PERFORM tests_fault(NEW.place); RETURN NEW; END$$"
        ),
        "DROP FUNCTION tests_refuse",
    )
    if stage in WRITES:
        yield (
            (
                "CREATE TRIGGER tests_refuse BEFORE UPDATE ON tests_errand FOR EACH ROW "
                f"WHEN ({WRITES[stage]}) EXECUTE FUNCTION tests_refuse()"
            ),
            "DROP TRIGGER tests_refuse ON tests_errand",
        )


def _mariadb(stage: str, action: str, place: int, most: int) -> Iterator[tuple[str, str]]:
    # A table without transactions.
    table = "CREATE TABLE tests_faults ENGINE = MyISAM AS SELECT 0 AS n"
    yield table, "DROP TABLE tests_faults"
    body = f"""UPDATE tests_faults SET n = n + 1;
        IF (SELECT n FROM tests_faults) <= {most} THEN {action}; END IF;"""  # noqa: S608  # ours
    asked = f"@@in_transaction AND it = {place} AND {ASKED.get(stage, '0')}"
    yield (
        (
            "CREATE FUNCTION tests_pending(it INT, done BOOL) RETURNS BOOL MODIFIES SQL DATA BEGIN "
            f"IF {asked} THEN {body} END IF; RETURN NOT done; END"
        ),
        "DROP FUNCTION tests_pending",
    )
    if stage in WRITES:
        yield (
            (
                "CREATE TRIGGER tests_refuse BEFORE UPDATE ON tests_errand FOR EACH ROW BEGIN "
                f"IF NEW.place = {place} AND ({WRITES[stage]}) THEN {body} END IF; END"
            ),
            "DROP TRIGGER tests_refuse",
        )


def _sqlite(stage: str, action: str, place: int, most: int) -> Iterator[tuple[str, str]]:
    if stage in WRITES:
        yield (
            (
                "CREATE TRIGGER tests_refuse BEFORE UPDATE ON tests_errand "
                f"WHEN NEW.place = {place} AND ({WRITES[stage]}) "
                f"BEGIN SELECT CASE WHEN tests_fault() THEN {action} END; END"
            ),
            "DROP TRIGGER tests_refuse",
        )


class _Count:
    """How often a fault was asked for where no statement can count it: SQLite."""

    asked = 0


@contextmanager
def _functions(stage: str, answer: str, place: int, most: int) -> Iterator[None]:
    """Let each connection to SQLite have the functions of the fault, which are Python's."""

    def have(connection: Any, **_: Any) -> None:
        driver = connection.connection

        def fault() -> bool:
            _Count.asked += 1
            if answer == "cancel" and most >= _Count.asked:
                driver.interrupt()
            return _Count.asked <= most

        def pending(it: int, done: int) -> bool:
            if driver.in_transaction and it == place and bool(done) == (stage == "look"):
                fault()
            return not done

        driver.create_function("tests_fault", 0, fault)
        driver.create_function("tests_pending", 2, pending)

    if connection.vendor != "sqlite":
        yield
        return
    connections.close_all()
    connection_created.connect(have)
    try:
        yield
    finally:
        connection_created.disconnect(have)
        connections.close_all()


#: How to read how often the fault was asked for.
_ASKED = {
    "postgresql": "SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM tests_faults",
    "mysql": "SELECT n FROM tests_faults",
}


def fired() -> int:
    """Return how often the fault was asked for."""
    if connection.vendor not in _ASKED:
        return _Count.asked
    found = _execute(_ASKED[connection.vendor])
    assert found is not None
    return int(found[0])
