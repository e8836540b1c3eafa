"""The rows, and what the database itself keeps of their work and of their flips."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from .audit import Call, read
from .blows import Blow
from .crew import CHECKOUT
from .judgement import Records, Row
from .routes import DIRECT
from .server import Server

#: The deliveries, by the names of the processors of each model.
MODELS = {
    "one-table": ("transactional", "at_most_once", "at_least_once"),
    "two-tables": (
        "two_tables_transactional",
        "two_tables_at_most_once",
        "two_tables_at_least_once",
    ),
}

#: The processors, by what says in a row which one it is for: ``place``, or ``result`` as a number.
PROCESSORS = tuple(name for names in MODELS.values() for name in names)

#: The triggers count the flips beside the package, and are committed, or rolled back, with them.
MAKE = """
CREATE INDEX errands_pending ON tests_errand (place, id) WHERE NOT done;
CREATE INDEX freights_pending ON tests_freight (result, id) WHERE NOT done;
CREATE TABLE chaos_work (place int, row_id bigint, backend int);
CREATE TABLE chaos_settled (place int, row_id bigint);
CREATE FUNCTION chaos_errand() RETURNS trigger LANGUAGE plpgsql AS
    'BEGIN INSERT INTO chaos_settled VALUES (NEW.place, NEW.id); RETURN NULL; END';
CREATE FUNCTION chaos_freight() RETURNS trigger LANGUAGE plpgsql AS
    'BEGIN INSERT INTO chaos_settled VALUES (NEW.result::int, NEW.id); RETURN NULL; END';
CREATE TRIGGER chaos_settle AFTER UPDATE OF done ON tests_errand
    FOR EACH ROW WHEN (NEW.done) EXECUTE FUNCTION chaos_errand();
CREATE TRIGGER chaos_settle AFTER UPDATE OF done ON tests_freight
    FOR EACH ROW WHEN (NEW.done) EXECUTE FUNCTION chaos_freight();
CREATE VIEW chaos_rows AS
    SELECT place, id, done, claimed, dead, leased_until, attempts, next_attempt_at, last_error
    FROM tests_errand
    UNION ALL
    SELECT result::int, id, done, claimed, dead, leased_until, attempts, next_attempt_at, last_error
    FROM tests_freight JOIN tests_express ON freight_ptr_id = id;
"""

FILL = {
    "one-table": (
        "INSERT INTO tests_errand (place, attempts, last_error, done, dead, claimed, result) "
        "SELECT %s, 0, '', false, false, false, '' FROM generate_series(1, %s)"
    ),
    "two-tables": (
        "WITH made AS (INSERT INTO tests_freight (result, done, dead, claimed) "
        "SELECT %s::int::text, false, false, false FROM generate_series(1, %s) RETURNING id) "
        "INSERT INTO tests_express (freight_ptr_id, attempts, last_error) "
        "SELECT id, 0, '' FROM made"
    ),
}

WITHDRAW = {
    "one-table": (
        "DELETE FROM tests_errand WHERE id IN (SELECT id FROM tests_errand WHERE place = %s "
        "AND NOT (done OR dead OR claimed) AND leased_until IS NULL AND id <> ALL (%s) "
        "FOR UPDATE SKIP LOCKED) RETURNING id"
    ),
    "two-tables": (
        "WITH idle AS (SELECT id FROM tests_freight JOIN tests_express ON freight_ptr_id = id "
        "WHERE result = %s::int::text AND NOT (done OR dead OR claimed) "
        "AND leased_until IS NULL AND id <> ALL (%s) FOR UPDATE SKIP LOCKED), "
        "gone AS (DELETE FROM tests_express USING idle WHERE freight_ptr_id = idle.id) "
        "DELETE FROM tests_freight USING idle WHERE tests_freight.id = idle.id "
        "RETURNING tests_freight.id"
    ),
}

LEFT = "SELECT count(*) FROM chaos_rows WHERE place = %s AND NOT (done OR dead OR claimed)"

#: The last column: what an attempt keeps beside the row, and a flip takes away.
ROWS = (
    "SELECT id, done, claimed, dead, leased_until IS NOT NULL OR attempts > 0 "
    "OR next_attempt_at IS NOT NULL OR last_error <> '' "
    "FROM chaos_rows WHERE place = %s ORDER BY id"
)


def make(server: Server) -> None:
    _python(server, "django", "migrate", "--run-syncdb", "--verbosity", "0")
    server.ask(MAKE)


def model_of(name: str) -> str:
    return next(model for model, names in MODELS.items() if name in names)


def fill(server: Server, name: str, rows: int) -> None:
    server.ask(FILL[model_of(name)], PROCESSORS.index(name), rows)


def left(server: Server, name: str) -> int:
    """Return how many rows wait, or are at work and may wait again."""
    [(number,)] = server.ask(LEFT, PROCESSORS.index(name))
    return int(number)


def withdraw(server: Server, name: str, calls: Sequence[Call]) -> int:
    """Delete the rows that no handler has begun; return how many."""
    place = PROCESSORS.index(name)
    begun = sorted({call.pk for call in calls if call.place == place})
    return len(server.ask(WITHDRAW[model_of(name)], place, begun))


def records(server: Server, name: str, audit: Path, blows: Sequence[Blow]) -> Records:
    """Gather all that is known of a processor's rows, when no worker is left."""
    place = PROCESSORS.index(name)
    doubts = _python(server, "tests.chaos.doubts", name) if "at_most_once" in name else "[]"
    return Records(
        rows=[Row(*row) for row in server.ask(ROWS, place)],
        calls=[call for call in read(audit) if call.place == place],
        worked=_counted(server, "SELECT row_id FROM chaos_work WHERE place = %s", place),
        settled=_counted(server, "SELECT row_id FROM chaos_settled WHERE place = %s", place),
        in_doubt=frozenset(json.loads(doubts)),
        blows=blows,
    )


def _counted(server: Server, sql: str, place: int) -> Counter[int]:
    return Counter(pk for (pk,) in server.ask(sql, place))


def _python(server: Server, module: str, *arguments: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env={
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "tests.chaos.settings",
            "PYTHONPATH": str(CHECKOUT),
            "CHAOS_DATABASE": json.dumps(server.database),
            "CHAOS_ROUTE": DIRECT,
            "CHAOS_BROKEN": "no",
        },
        cwd=CHECKOUT,
        check=True,
        timeout=120,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
