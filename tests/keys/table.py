"""The rows, the log, and the triggers that write what becomes of a row to it."""

from __future__ import annotations

from django.db import connection

from tests.models import Errand

from .audit import NEVER, Line, Wait

#: Between two rows, so that others can be committed late with a key between theirs.
APART = 10
#: Keys, of which the first is the hot one.
KEYS = 40

MAKE = """
CREATE INDEX keys_rows ON tests_errand (place, id) WHERE NOT done;
CREATE INDEX keys_leased ON tests_errand (place) WHERE leased_until IS NOT NULL;
CREATE INDEX keys_claimed ON tests_errand (place) WHERE claimed_at IS NOT NULL;
CREATE TABLE keys_log (
    number bigserial, row_id bigint, key int, what text, at float8, turn float8, until float8
);
CREATE FUNCTION keys_note() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE moment float8 := extract(epoch FROM clock_timestamp());
BEGIN
    IF NEW.done AND NOT OLD.done THEN
        INSERT INTO keys_log (row_id, key, what, at) VALUES (NEW.id, NEW.place, 'done', moment);
    ELSIF NEW.claimed_at IS NOT NULL OR NEW.leased_until IS NOT NULL THEN
        INSERT INTO keys_log (row_id, key, what, at, until) VALUES (
            NEW.id, NEW.place, 'held', moment, extract(epoch FROM NEW.leased_until));
    ELSIF OLD.claimed_at IS NOT NULL OR OLD.leased_until IS NOT NULL THEN
        INSERT INTO keys_log (row_id, key, what, at) VALUES (NEW.id, NEW.place, 'freed', moment);
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER keys_note AFTER UPDATE OF done, claimed_at, leased_until ON tests_errand
    FOR EACH ROW EXECUTE FUNCTION keys_note();
"""


DROP = """
DROP FUNCTION keys_note CASCADE;
DROP TABLE keys_log;
DROP INDEX keys_rows, keys_leased, keys_claimed;
"""


def fill(rows: int, hot: float) -> list[Wait]:
    """Have so many rows, the part ``hot`` of them in one key; return when each began to wait."""
    with connection.cursor() as cursor:
        cursor.execute("TRUNCATE tests_errand, keys_log")
    # In turn, and not at random, so that two runs are about the same rows.
    cold = max(1, round(1 / (1 - hot))) if hot else 1
    made = [
        Errand(pk=APART * number, place=0 if number % cold else 1 + number % (KEYS - 1))
        for number in range(1, rows + 1)
    ]
    Errand.objects.bulk_create(made)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE tests_errand")
    return [Wait(row.pk, row.place) for row in made]


def log() -> list[Line]:
    """Return the log in its order, which is that of the writes to each row."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT row_id, key, what, at, coalesce(turn, 0), until FROM keys_log ORDER BY number"
        )
        return [
            Line(row, key, what, at, turn, NEVER if until is None else until)
            for row, key, what, at, turn, until in cursor.fetchall()
        ]
