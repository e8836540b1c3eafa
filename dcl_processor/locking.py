"""Stage 2: lock the row, and ask again."""

from __future__ import annotations

from enum import Enum
from typing import Any, TypeVar

from django.db import connections
from django.db.models import Model, QuerySet
from django.db.models.constants import LOOKUP_SEP

from .pending import Question

M = TypeVar("M", bound=Model)


class Miss(Enum):
    """Why a candidate was not claimed."""

    #: Not in the answer: locked by somebody, finished, or gone. A lock-free look tells which.
    ABSENT = "absent"
    #: We had its lock, and it was not pending any more, or gone.
    STALE = "stale"


def claim(question: Question[M], pk: Any) -> M | Miss:
    """Return the row as read under its lock, or say why there is none.

    Never waits for a lock, where the database can do without. Runs inside the row's transaction.
    """
    if not connections[question.using].features.has_select_for_update:
        return _claim_database(question, pk)
    if question.own_table:
        # Second check: another copy may have finished the row since its key was read. Lock and
        # check are one statement, and the database checks the locked row's newest version.
        return _first(_locking(question.of(pk), question.using)) or Miss.ABSENT
    return _claim_spanning(question, pk)


def _claim_spanning(question: Question[M], pk: Any) -> M | Miss:
    for table in question.tables:
        if _first(_locking(_part(question, table, pk), question.using)) is None:
            return Miss.ABSENT
    # Second check: the lock statement's snapshot is older than the lock, and what is joined would
    # be read from that snapshot. A statement of its own sees what was committed until now.
    return _first(question.of(pk)) or Miss.STALE


def _claim_database(question: Question[M], pk: Any) -> M | Miss:
    # SQLite has one lock, for writing, and gives it at once only to a transaction that begins by
    # writing: an update that matches no row. A read before it would make the write fail later.
    connection = connections[question.using]
    table = connection.ops.quote_name(question.model._meta.db_table)
    column = connection.ops.quote_name(question.model._meta.concrete_fields[0].column)
    with connection.cursor() as cursor:
        cursor.execute(f"UPDATE {table} SET {column} = {column} WHERE 1 = 0")  # noqa: S608  # quoted
    # Second check: until the lock was got, another copy may have finished the row.
    return _first(question.of(pk)) or Miss.STALE


def _part(question: Question[Any], table: type[Model], pk: Any) -> QuerySet[Any, Any]:
    """Return the row's part in one table: its own, or that of a multi-table parent."""
    part = QuerySet(table, using=question.using).only("pk")
    if table is question.model:
        return part.filter(pk=pk)
    path = question.model._meta.get_path_to_parent(table)
    link = LOOKUP_SEP.join(step.join_field.name for step in path)
    row = QuerySet(question.model, using=question.using).filter(pk=pk)
    return part.filter(pk__in=row.values(link))


def _locking(queryset: QuerySet[M, M], using: str) -> QuerySet[M, M]:
    """Add the narrowest lock that the database has, and the way that waits least."""
    features = connections[using].features
    skip_locked = features.has_select_for_update_skip_locked
    return queryset.select_for_update(
        skip_locked=skip_locked,
        nowait=not skip_locked and features.has_select_for_update_nowait,
        # Rows that are joined belong to others.
        of=("self",) if features.has_select_for_update_of else (),
        # The lock that an UPDATE of plain columns takes: it lets others insert child rows.
        no_key=features.has_select_for_no_key_update,
    )


def _first(queryset: QuerySet[M, M]) -> M | None:
    # Not first(), which would order and slice: Oracle refuses LIMIT with FOR UPDATE, and a join
    # that gives the row twice gives the same row.
    rows = list(queryset)
    return rows[0] if rows else None
