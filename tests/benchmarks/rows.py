"""The rows: a table with the columns that all deliveries need, and an index on what is pending."""

from __future__ import annotations

from django.db import connection, transaction
from django.db.models import Model

from tests.models import Depot, Errand, Parcel

TABLE = Errand._meta.db_table
COLUMNS = tuple(str(field.column) for field in Errand._meta.concrete_fields)


def make_tables() -> None:
    """Make the tables of everything installed, and the index that the documentation advises."""
    from django.core.management import call_command

    call_command("migrate", run_syncdb=True, interactive=False, verbosity=0)
    _execute(
        f"CREATE INDEX errands_pending ON {TABLE} (id) WHERE NOT done",
        f"CREATE INDEX parcels_pending ON {Parcel._meta.db_table} (id) WHERE NOT sent",
    )


def fill(number: int) -> None:
    """Put so many pending rows, with keys from 1, into an otherwise empty table."""
    _fill(Errand(), number)


def fill_spanning(number: int) -> None:
    """Put rows there whose question asks another table, too."""
    _execute(f"TRUNCATE {Depot._meta.db_table} RESTART IDENTITY CASCADE")
    _fill(Parcel(depot=Depot.objects.create()), number)


def left() -> int:
    return Errand.objects.filter(done=False).count()


def left_spanning() -> int:
    return Parcel.objects.filter(sent=False).count()


def settle_down(*tables: str) -> None:
    """Leave no work of the preparation's to the time that is measured."""
    _execute(*(f"VACUUM (ANALYZE) {table}" for table in tables), "CHECKPOINT")


def _fill(first: Model, number: int) -> None:
    meta = first._meta
    others = [f'"{field.column}"' for field in meta.concrete_fields if not field.primary_key]
    columns = ", ".join(others)
    # TRUNCATE makes new files: no contender meets the dead rows of the one before.
    with transaction.atomic():
        _execute(f"TRUNCATE {meta.db_table} RESTART IDENTITY CASCADE")
        first.save(force_insert=True)
        _execute(
            f"INSERT INTO {meta.db_table} ({columns}) "  # noqa: S608  # the model's own names
            f"SELECT {columns} FROM {meta.db_table}, generate_series(2, {number})"
        )
    settle_down(meta.db_table)


def _execute(*statements: str) -> None:
    with connection.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)
