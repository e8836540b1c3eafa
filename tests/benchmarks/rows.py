"""The rows: a table with the columns that all deliveries need, and an index on what is pending."""

from __future__ import annotations

from django.db import connection, transaction

from tests.models import Errand

TABLE = Errand._meta.db_table
#: The key of a row, where it has one: that of one of a hundred customers, as they come.
KEY = "mod(abs(hashtext(id::text)), 100)"
COLUMNS = tuple(str(field.column) for field in Errand._meta.concrete_fields)


def make_tables() -> None:
    """Make the tables of everything installed, and the index that the documentation advises."""
    from django.core.management import call_command

    call_command("migrate", run_syncdb=True, interactive=False, verbosity=0)
    _execute(f"CREATE INDEX errands_pending ON {TABLE} (id) WHERE NOT done")


def fill(number: int) -> None:
    """Put so many pending rows, with keys from 1, into an otherwise empty table."""
    _execute("DROP INDEX IF EXISTS errands_of_keys, errands_leased")
    others = [
        f'"{field.column}"' for field in Errand._meta.concrete_fields if not field.primary_key
    ]
    columns = ", ".join(others)
    # TRUNCATE makes new files: no contender meets the dead rows of the one before.
    with transaction.atomic():
        _execute(f"TRUNCATE {TABLE} RESTART IDENTITY")
        Errand().save(force_insert=True)
        _execute(
            f"INSERT INTO {TABLE} ({columns}) "  # noqa: S608  # the model's own names
            f"SELECT {columns} FROM {TABLE}, generate_series(2, {number})"
        )
    settle_down(TABLE)


def fill_keys(number: int) -> None:
    """Put rows there that have a key, and the indexes that these need."""
    fill(number)
    _execute(
        f"UPDATE {TABLE} SET place = {KEY}",  # noqa: S608  # constants
        f"CREATE INDEX errands_of_keys ON {TABLE} (place, id) WHERE NOT done",
        f"CREATE INDEX errands_leased ON {TABLE} (place) WHERE leased_until IS NOT NULL",
    )
    settle_down(TABLE)


def left() -> int:
    return Errand.objects.filter(done=False).count()


def settle_down(*tables: str) -> None:
    """Leave no work of the preparation's to the time that is measured."""
    _execute(*(f"VACUUM (ANALYZE) {table}" for table in tables), "CHECKPOINT")


def _execute(*statements: str) -> None:
    with connection.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)
