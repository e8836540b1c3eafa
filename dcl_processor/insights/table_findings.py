"""Findings about the table of one model, as PostgreSQL's statistics show it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from django.db.models import Model

from dcl_processor.candidates.pending_index import suggested

from . import catalog
from .answer import Finding, ok, unknown, warning
from .statements import Asked

#: Multiples of autovacuum's threshold from which it is behind: it looks at a table once a minute.
FAR_BEHIND = 2

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
    if settings["track_counts"] == "off":
        yield unknown(
            "how many dead rows the table has",
            "track_counts is off, without which autovacuum does not work either",
            "Set track_counts = on",
        )
        return
    threshold = _threshold(table, settings)
    off = ("false", "off", "0", "no")
    is_off = settings["autovacuum"] == "off" or table.options.get("autovacuum_enabled") in off
    if not is_off and table.dead <= FAR_BEHIND * threshold:
        yield ok(f"{table.dead} dead rows, and autovacuum starts after {threshold:.0f}")
        return
    behind = f"{table.dead} dead rows, where autovacuum starts after {threshold:.0f}"
    yield warning(
        f"autovacuum is off for the table, which has {table.dead} dead rows" if is_off else behind,
        "Every flip leaves a dead row and a dead entry in the pending index, and each lock-free "
        "read passes them",
        "VACUUM the table; set autovacuum_enabled = true, autovacuum_vacuum_scale_factor = 0 and "
        "autovacuum_vacuum_threshold = 5000 for it; look for an old snapshot",
    )


def _threshold(table: catalog.Table, settings: Mapping[str, str]) -> float:
    # Since PostgreSQL 18 there is a maximum; below 0 there is none.
    known = {"autovacuum_vacuum_max_threshold": "-1", **settings, **table.options}
    least, share, most = (
        float(known[f"autovacuum_vacuum_{name}"])
        for name in ("threshold", "scale_factor", "max_threshold")
    )
    wanted = least + share * (table.rows or 0)
    return min(wanted, most) if most >= 0 else wanted


def needless_indexes(using: str, asked: Sequence[Asked]) -> Iterator[Finding]:
    """Find indexes that each row's flip, claim or lease has to write to; of one table's users."""
    model = asked[0].question.model
    written = {column for each in asked for column in _written(each)}
    written -= {column for each in asked for column in _read_by(each)}
    table, is_clean = catalog.table(using, model), True
    for index in catalog.indexes(using, model):
        columns = sorted(written & {*index.columns})
        # The condition of a partial index needs the flag, and a unique index is a constraint.
        if not index.is_partial and not index.is_unique and columns:
            is_clean = False
            used = f", used {index.scans} times since the statistics began"
            yield warning(
                f"the index {index.name} holds {' and '.join(columns)}"
                f"{'' if index.scans is None else used}",
                "Each flip writes to it, and to every other index of the table, because PostgreSQL "
                f"cannot update the row in place ({table.hot} of {table.updates} updates were)",
                "If no other query needs it, drop it (db_index, Meta.indexes), and let a partial "
                "index of the pending rows serve the read: manage.py processors explain",
            )
    if is_clean:
        yield ok("no plain index holds a column that is written for each row")


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
    index = suggested(asked.processor, asked.question).read
    for name in [] if index is None else index.fields:
        field: Any = asked.question.model._meta.get_field(name.lstrip("-"))
        yield field.column
