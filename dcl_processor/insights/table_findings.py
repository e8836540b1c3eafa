"""Findings about the table of one model, as PostgreSQL's statistics show it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from django.db.models import Model

from . import catalog
from .explanation import SMALL
from .findings import Finding, Level, ok
from .session_findings import about
from .statements import Asked, estimated_rows

#: Multiples of autovacuum's threshold from which it is behind: it looks at a table once a minute.
FAR_BEHIND = 2

#: The part of a table that is suspicious if it is pending.
MOST_OF_IT = 0.8

_THRESHOLDS = (
    "autovacuum",
    "track_counts",
    "autovacuum_vacuum_threshold",
    "autovacuum_vacuum_scale_factor",
    "autovacuum_vacuum_max_threshold",
)


def autovacuum(using: str, model: type[Model]) -> Iterator[Finding]:
    """Find whether dead rows are removed from the table in time."""
    table, settings = catalog.table(using, model), catalog.settings(using, *_THRESHOLDS)
    where = _where(using, model)
    if settings["track_counts"].value == "off":
        yield Finding(
            Level.UNKNOWN,
            "autovacuum",
            where,
            "how many dead rows the table has",
            "track_counts is off, without which autovacuum does not work either",
            "Set track_counts = on",
        )
        return
    threshold = _threshold(table, settings)
    is_off = settings["autovacuum"].value == "off" or table.options.get("autovacuum_enabled") in {
        "false",
        "off",
        "0",
        "no",
    }
    if not is_off and table.dead <= FAR_BEHIND * threshold:
        what = f"{table.dead} dead rows, and autovacuum starts after {threshold:.0f}"
        yield ok("autovacuum", where, what)
        return
    what = f"{table.dead} dead rows, where autovacuum starts after {threshold:.0f}"
    yield Finding(
        Level.WARNING,
        "autovacuum",
        where,
        f"autovacuum is off for the table, which has {table.dead} dead rows" if is_off else what,
        "Every flip leaves a dead row and a dead entry in the pending index, and each lock-free "
        "read passes them",
        "VACUUM the table; set autovacuum_enabled = true, autovacuum_vacuum_scale_factor = 0 and "
        "autovacuum_vacuum_threshold = 5000 for it; look for an old snapshot",
    )


def _threshold(table: catalog.Table, settings: dict[str, catalog.Setting]) -> float:
    def of(name: str) -> float:
        return float(table.options.get(name, settings[name].value))

    rows = table.rows or 0
    wanted = of("autovacuum_vacuum_threshold") + of("autovacuum_vacuum_scale_factor") * rows
    # Since PostgreSQL 18; below 0 there is none.
    if "autovacuum_vacuum_max_threshold" not in settings:
        return wanted
    most = of("autovacuum_vacuum_max_threshold")
    return min(wanted, most) if most >= 0 else wanted


def needless_indexes(using: str, asked: Sequence[Asked]) -> Iterator[Finding]:
    """Find indexes that each row's flip, claim or lease has to write to; of one table's users."""
    model = asked[0].question.model
    written = {column for each in asked for column in _written(each)}
    written -= {column for each in asked for column in _read_by(each)}
    table = catalog.table(using, model)
    found = [
        (index, sorted(written & {*index.columns}))
        for index in catalog.indexes(using, model)
        # The condition of a partial index needs the flag, and a unique index is a constraint.
        if not index.is_partial and not index.is_unique and written & {*index.columns}
    ]
    for index, columns in found:
        used = (
            "" if index.scans is None else f", used {index.scans} times since the statistics began"
        )
        yield Finding(
            Level.WARNING,
            "flag-index",
            _where(using, model),
            f"the index {index.name} holds {' and '.join(columns)}{used}",
            "Each flip writes to it, and to every other index of the table, because PostgreSQL "
            f"cannot update the row in place ({table.hot} of {table.updates} updates were)",
            "If no other query needs it, drop it (db_index, Meta.indexes), and let a partial index "
            "of the pending rows serve the read: manage.py processors explain",
        )
    if not found:
        what = "no plain index holds a column that is written for each row"
        yield ok("flag-index", _where(using, model), what)


def _written(asked: Asked) -> Iterator[str]:
    """Yield the columns of the model's own table that are written for each row."""
    processor, meta = asked.processor, asked.question.model._meta
    names = [
        *(processor.done or ()),
        *(processor.claim or ()),
        *([processor.claimed_at] if processor.claimed_at else []),
        *([processor.lease.field] if processor.lease else []),
        *(processor.retry.columns if processor.retry else ()),
    ]
    for name in names:
        field: Any = meta.get_field(name)
        # The index of a foreign key is for deletions of the row that it points to.
        if field in meta.local_concrete_fields and not field.is_relation:
            yield field.column


def _read_by(asked: Asked) -> Iterator[str]:
    """Yield the columns by which the index of the pending rows finds them."""
    index = asked.indexes().read
    for name in [] if index is None else index.fields:
        field: Any = asked.question.model._meta.get_field(name.lstrip("-"))
        yield field.column


def pending_share(using: str, asked: Asked) -> Iterator[Finding]:
    """Find whether the question suddenly holds the whole table, by the planner's estimate."""
    name = asked.processor.name
    number = estimated_rows(asked.question.unfiltered.order_by().values_list("pk"))
    if number == 0:
        yield ok("pending", name, "no row can be pending")
        return
    table = catalog.table(using, asked.question.model)
    if (
        number is None
        or table.rows is None
        or table.analyzed is None
        or number > max(2 * table.rows, SMALL)  # it has grown since
    ):
        yield Finding(
            Level.UNKNOWN,
            "pending",
            name,
            "which part of the table is pending",
            "The planner has no statistics of the table, or old ones",
            f"ANALYZE {asked.question.model._meta.db_table}",
        )
        return
    about_all = f"about {number:.0f} of about {table.rows:.0f} rows are pending"
    if table.changed > max(table.rows, SMALL):
        about_all += f", with {table.changed} rows changed since the last ANALYZE"
    if table.rows < SMALL or number < MOST_OF_IT * table.rows:
        yield ok("pending", name, about_all)
        return
    yield Finding(
        Level.WARNING,
        "pending",
        name,
        f"{about_all}, which is nearly the whole table",
        "A condition that was lost, or a migration that reset the flag, would handle rows again "
        "that were done long ago",
        "Compare with the number that you expect before the next run; for rows that are all "
        "pending, such as those of a queue, it is right",
    )


def _where(using: str, model: type[Model]) -> str:
    return f"table {model._meta.db_table} of {about(using)}"
