"""The rows, and what the database itself keeps of their work and of their flips."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from django.core.management import call_command
from django.db import connections

from tests.servers.stoppable import Server

from .audit import Call, read
from .blows import Blow
from .judgement import Records, Row, Terms

#: The processors of each model, and what each of them promises.
MODELS = {
    "one-table": {
        "transactional": Terms("transactional"),
        "at_most_once": Terms("at_most_once"),
        "at_least_once": Terms("at_least_once"),
    },
    "keys": {
        "in_order_transactional": Terms("transactional", most=1, in_order=True, has_keys=True),
        "in_order_at_most_once": Terms("at_most_once", most=1, in_order=True, has_keys=True),
        "in_order_at_least_once": Terms("at_least_once", most=1, in_order=True, has_keys=True),
    },
    "two-per-key": {
        "two_per_key_transactional": Terms("transactional", most=2, has_keys=True),
        "two_per_key_at_most_once": Terms("at_most_once", most=2, has_keys=True),
        "two_per_key_at_least_once": Terms("at_least_once", most=2, has_keys=True),
    },
    "capped": {
        "capped_transactional": Terms("transactional", most=3),
        "capped_at_least_once": Terms("at_least_once", most=3),
    },
    "fair": {
        "fair_transactional": Terms("transactional", has_keys=True),
        "fair_at_least_once": Terms("at_least_once", has_keys=True),
    },
}

PROCESSORS = {name: terms for processors in MODELS.values() for name, terms in processors.items()}

#: Those of the short run, in which each further one takes seconds. No person is in it.
CUT = (
    *MODELS["one-table"],
    "in_order_transactional",
    "in_order_at_least_once",
    "two_per_key_transactional",
)

#: What says in a row which processor it is for: ``place``.
PLACES = {name: place for place, name in enumerate(PROCESSORS)}

#: The triggers count the flips beside the package, and are committed, or rolled back, with them.
MAKE = """
CREATE INDEX errands_pending ON tests_errand (place, id) WHERE NOT done;
CREATE INDEX errands_of_keys ON tests_errand (result, id) WHERE NOT done;
CREATE INDEX errands_claimed ON tests_errand (result) WHERE claimed_at IS NOT NULL;
CREATE INDEX errands_leased ON tests_errand (result) WHERE leased_until IS NOT NULL;
CREATE TABLE chaos_decided (place int, row_id bigint, at double precision);
CREATE TABLE chaos_work (place int, row_id bigint, backend int);
CREATE TABLE chaos_settled (place int, row_id bigint);
CREATE FUNCTION chaos_errand() RETURNS trigger LANGUAGE plpgsql AS
    'BEGIN INSERT INTO chaos_settled VALUES (NEW.place, NEW.id); RETURN NULL; END';
CREATE TRIGGER chaos_settle AFTER UPDATE OF done ON tests_errand
    FOR EACH ROW WHEN (NEW.done) EXECUTE FUNCTION chaos_errand();
CREATE VIEW chaos_rows AS
    SELECT place, id, done, claimed, dead, leased_until, attempts, next_attempt_at, last_error,
    result AS key FROM tests_errand;
"""

#: Each processor has keys of its own, one of which has seven rows of ten.
_KEY = "place || '-' || CASE WHEN n %% 10 < 7 THEN 0 ELSE 1 + n %% 8 END"

_FILL = (
    "INSERT INTO tests_errand (place, attempts, last_error, done, dead, claimed, result) "
    "SELECT place, 0, '', false, false, false, {key} "
    "FROM (SELECT %s::int AS place) AS given, generate_series(1, %s) AS n"
)

WITHDRAW = (
    "DELETE FROM tests_errand WHERE id IN (SELECT id FROM tests_errand WHERE place = %s "
    "AND NOT (done OR dead OR claimed) AND leased_until IS NULL AND id <> ALL (%s) "
    "FOR UPDATE SKIP LOCKED) RETURNING id"
)

LEFT = "SELECT count(*) FROM chaos_rows WHERE place = %s AND NOT (done OR dead OR claimed)"

#: The column before the last: what an attempt keeps beside the row, and a flip takes away.
ROWS = (
    "SELECT id, done, claimed, dead, leased_until IS NOT NULL OR attempts > 0 "
    "OR next_attempt_at IS NOT NULL OR last_error <> '', key "
    "FROM chaos_rows WHERE place = %s ORDER BY id"
)

DECIDED = "SELECT row_id, at FROM chaos_decided WHERE place = %s ORDER BY at"


def make(server: Server) -> None:
    call_command("migrate", run_syncdb=True, verbosity=0)
    connections.close_all()
    server.ask(MAKE)


def fill(server: Server, name: str, rows: int) -> None:
    key = _KEY if PROCESSORS[name].has_keys else "''"
    server.ask(_FILL.format(key=key), PLACES[name], rows)


def left(server: Server, name: str) -> int:
    """Return how many rows wait, or are at work and may wait again."""
    [(number,)] = server.ask(LEFT, PLACES[name])
    return int(number)


def withdraw(server: Server, name: str, calls: Sequence[Call]) -> int:
    """Delete the rows that no handler has begun; return how many."""
    place = PLACES[name]
    begun = sorted({call.pk for call in calls if call.place == place})
    return len(server.ask(WITHDRAW, place, begun))


def records(server: Server, name: str, audit: Path, blows: Sequence[Blow]) -> Records:
    """Gather all that is known of a processor's rows, when no worker is left."""
    place = PLACES[name]
    rows = [Row(*row) for row in server.ask(ROWS, place)]
    doubts: set[int] = set()
    if PROCESSORS[name].delivery == "at_most_once":
        from . import processors  # which needs the models

        # These are the doubts of the table, which has rows of other processors, too.
        doubts = {row.pk for row in getattr(processors, name).in_doubt(older_than=0)}
        connections.close_all()
    decided: dict[int, list[float]] = defaultdict(list)
    for pk, at in server.ask(DECIDED, place):
        decided[pk].append(at)
    return Records(
        rows=rows,
        calls=[call for call in read(audit) if call.place == place],
        worked=_counted(server, "SELECT row_id FROM chaos_work WHERE place = %s", place),
        settled=_counted(server, "SELECT row_id FROM chaos_settled WHERE place = %s", place),
        in_doubt=doubts & {row.pk for row in rows},
        blows=blows,
        decided=decided,
    )


def _counted(server: Server, sql: str, place: int) -> Counter[int]:
    return Counter(pk for (pk,) in server.ask(sql, place))
