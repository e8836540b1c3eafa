"""Objects of the database that exist for one test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from django.db import connections


def execute(sql: str, using: str = "default") -> None:
    with connections[using].cursor() as cursor:
        cursor.execute(sql)


@contextmanager
def temporary(create: str, drop: str) -> Iterator[None]:
    """Create something for the time of the block."""
    execute(create)
    try:
        yield
    finally:
        execute(drop)


def at_update(
    condition: str, action: str, *, times: int | None = None, table: str = "tests_errand"
) -> AbstractContextManager[None]:
    """Let PostgreSQL do something in each update for which the condition holds.

    ``times``: in so many of them, counted by a sequence, which does not go back with a transaction.
    """
    counted = "" if times is None else f" AND nextval('tests_times') <= {times}"
    return temporary(
        "CREATE SEQUENCE tests_times; "
        "CREATE FUNCTION tests_at_update() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN IF {condition}{counted} THEN {action}; END IF; RETURN NEW; END $$; "
        f"CREATE TRIGGER tests_at_update BEFORE UPDATE ON {table} "
        "FOR EACH ROW EXECUTE FUNCTION tests_at_update()",
        f"DROP TRIGGER tests_at_update ON {table}; DROP FUNCTION tests_at_update; "
        "DROP SEQUENCE tests_times",
    )
