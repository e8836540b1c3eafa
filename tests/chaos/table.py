"""The rows, and what the database itself keeps of their work and of their flips."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from django.core.management import call_command
from django.db import connections

from tests.servers.stoppable import Server

from .audit import Call, read
from .blows import Blow
from .judgement import Records, Row

#: The processors, each with the number that says in a row which one it is for: ``place``.
DELIVERIES = {"transactional": 0, "at_most_once": 1, "at_least_once": 2}

#: The triggers count the flips beside the package, and are committed, or rolled back, with them.
MAKE = """
CREATE INDEX errands_pending ON tests_errand (place, id) WHERE NOT done;
CREATE TABLE chaos_work (place int, row_id bigint, backend int);
CREATE TABLE chaos_settled (place int, row_id bigint);
CREATE FUNCTION chaos_settle() RETURNS trigger LANGUAGE plpgsql AS
    'BEGIN INSERT INTO chaos_settled VALUES (NEW.place, NEW.id); RETURN NULL; END';
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

#: The last column: what an attempt keeps beside the row, and a flip takes away.
ROWS = (
    "SELECT id, done, claimed, dead, leased_until IS NOT NULL OR attempts > 0 "
    "OR next_attempt_at IS NOT NULL OR last_error <> '' "
    "FROM tests_errand WHERE place = %s ORDER BY id"
)


def make(server: Server) -> None:
    call_command("migrate", run_syncdb=True, verbosity=0)
    connections.close_all()
    server.ask(MAKE)


def fill(server: Server, name: str, rows: int) -> None:
    server.ask(FILL, DELIVERIES[name], rows)


def left(server: Server, name: str) -> int:
    """Return how many rows wait, or are at work and may wait again."""
    [(number,)] = server.ask(LEFT, DELIVERIES[name])
    return int(number)


def withdraw(server: Server, name: str, calls: Sequence[Call]) -> int:
    """Delete the rows that no handler has begun; return how many."""
    place = DELIVERIES[name]
    begun = sorted({call.pk for call in calls if call.place == place})
    return len(server.ask(WITHDRAW, place, begun))


def records(server: Server, name: str, audit: Path, blows: Sequence[Blow]) -> Records:
    """Gather all that is known of a processor's rows, when no worker is left."""
    place = DELIVERIES[name]
    rows = [Row(*row) for row in server.ask(ROWS, place)]
    doubts: set[int] = set()
    if name == "at_most_once":
        from . import processors  # which needs the models

        # These are the doubts of the table, which has rows of other processors, too.
        doubts = {row.pk for row in getattr(processors, name).in_doubt(older_than=0)}
        connections.close_all()
    return Records(
        rows=rows,
        calls=[call for call in read(audit) if call.place == place],
        worked=_counted(server, "SELECT row_id FROM chaos_work WHERE place = %s", place),
        settled=_counted(server, "SELECT row_id FROM chaos_settled WHERE place = %s", place),
        in_doubt=doubts & {row.pk for row in rows},
        blows=blows,
    )


def _counted(server: Server, sql: str, place: int) -> Counter[int]:
    return Counter(pk for (pk,) in server.ask(sql, place))
