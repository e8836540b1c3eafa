"""The rows, and what the database itself keeps of their work and of their flips."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from .audit import read
from .blows import Blow
from .crew import CHECKOUT
from .judgement import Records, Row
from .routes import DIRECT
from .server import Server

#: The deliveries, by what ``place`` says in a row.
DELIVERIES = ("transactional", "at_most_once", "at_least_once")

#: The trigger counts the flips beside the package, and is committed, or rolled back, with them.
MAKE = """
CREATE INDEX errands_pending ON tests_errand (place, id) WHERE NOT done;
CREATE TABLE chaos_work (row_id bigint, backend int);
CREATE TABLE chaos_settled (row_id bigint);
CREATE FUNCTION chaos_settle() RETURNS trigger LANGUAGE plpgsql AS
    'BEGIN INSERT INTO chaos_settled VALUES (NEW.id); RETURN NULL; END';
CREATE TRIGGER chaos_settle AFTER UPDATE OF done ON tests_errand
    FOR EACH ROW WHEN (NEW.done) EXECUTE FUNCTION chaos_settle();
"""

FILL = (
    "INSERT INTO tests_errand (place, attempts, last_error, done, dead, claimed, result) "
    "SELECT %s, 0, '', false, false, false, '' FROM generate_series(1, %s)"
)

WITHDRAW = (
    "DELETE FROM tests_errand WHERE id IN (SELECT id FROM tests_errand WHERE place = %s "
    "AND NOT (done OR dead OR claimed) AND leased_until IS NULL AND id <> ALL (%s) "
    "FOR UPDATE SKIP LOCKED) RETURNING id"
)

LEFT = "SELECT count(*) FROM tests_errand WHERE place = %s AND NOT (done OR dead OR claimed)"


def make(server: Server) -> None:
    _python(server, "django", "migrate", "--run-syncdb", "--verbosity", "0")
    server.ask(MAKE)


def fill(server: Server, delivery: str, rows: int) -> None:
    server.ask(FILL, DELIVERIES.index(delivery), rows)


def left(server: Server, delivery: str) -> int:
    """Return how many rows wait, or are at work and may wait again."""
    [(number,)] = server.ask(LEFT, DELIVERIES.index(delivery))
    return int(number)


def withdraw(server: Server, delivery: str, begun: Sequence[int]) -> int:
    """Delete the rows that nobody has begun; return how many."""
    return len(server.ask(WITHDRAW, DELIVERIES.index(delivery), list(begun)))


def records(server: Server, delivery: str, audit: Path, blows: Sequence[Blow]) -> Records:
    """Gather all that is known of a delivery's rows, when nobody works any more."""
    place = DELIVERIES.index(delivery)
    found = server.ask(
        "SELECT id, done, claimed, dead FROM tests_errand WHERE place = %s ORDER BY id", place
    )
    doubts = _python(server, "tests.chaos.doubts") if delivery == "at_most_once" else "[]"
    return Records(
        rows=[Row(*row) for row in found],
        calls=[call for call in read(audit) if call.place == place],
        worked=Counter(pk for (pk,) in server.ask("SELECT row_id FROM chaos_work")),
        settled=Counter(pk for (pk,) in server.ask("SELECT row_id FROM chaos_settled")),
        in_doubt=frozenset(json.loads(doubts)),
        blows=blows,
    )


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
