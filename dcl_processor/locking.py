"""Stage 2: lock the row, and ask again."""

from __future__ import annotations

from enum import Enum
from typing import Any, TypeVar

from django.db import connections
from django.db.models import Model, QuerySet
from django.db.models.constants import LOOKUP_SEP

from .exceptions import InvalidPending
from .pending import Question

M = TypeVar("M", bound=Model)
R = TypeVar("R")


class Miss(Enum):
    """Why a candidate was not claimed."""

    #: Not in the answer: locked by somebody, finished, or gone. A lock-free look tells which.
    ABSENT = "absent"
    #: We had its lock, and it was not pending any more, or gone.
    STALE = "stale"


def claim(question: Question[M], pk: Any) -> M | Miss:
    """Return the row as read under its lock, or say why there is none.

    Never waits for a lock, where the database can do without. Runs inside the row's transaction.
    Raises ``InvalidPending`` when the question has several answers for one row.
    """
    if not connections[question.using].features.has_select_for_update:
        return _claim_database(question, pk)
    if question.own_table:
        # Second check: another copy may have finished the row since its key was read. Lock and
        # check are one statement, and the database checks the locked row's newest version. Not
        # first(), which would order and slice: Oracle refuses LIMIT with FOR UPDATE.
        return next(iter(_locking(question.of(pk), question.using)), Miss.ABSENT)
    return _claim_spanning(question, pk)


def _claim_spanning(question: Question[M], pk: Any) -> M | Miss:
    for table in question.tables:
        if not _lock(question, table, pk):
            return Miss.ABSENT
    # Second check: the lock statement's snapshot is older than the lock, and what is joined would
    # be read from that snapshot. A statement of its own sees what was committed until now.
    return _answer(question, pk)


def _claim_database(question: Question[M], pk: Any) -> M | Miss:
    # SQLite has one lock, for writing, and gives it at once only to a transaction that begins by
    # writing: an update that matches no row. A read before it would make the write fail later.
    connection = connections[question.using]
    table = connection.ops.quote_name(question.model._meta.db_table)
    key: Any = question.model._meta.pk_fields[0]
    column = connection.ops.quote_name(key.column)
    with connection.cursor() as cursor:
        cursor.execute(f"UPDATE {table} SET {column} = {column} WHERE 1 = 0")  # noqa: S608  # quoted
    # Second check: until the lock was got, another copy may have finished the row.
    return _answer(question, pk)


def _lock(question: Question[Any], table: type[Model], pk: Any) -> bool:
    """Lock the row's part in one table: its own, or that of a multi-table parent."""
    key = pk if table is question.model else _parent_key(question, table, pk)
    # Keys alone: an instance would run the model's own code, for a row that nobody is handed.
    part = QuerySet[Any](table, using=question.using).filter(pk=key)
    return bool(_locking(part.values_list(table._meta.pk_fields[0].name), question.using))


def _parent_key(question: Question[Any], parent: type[Model], pk: Any) -> Any:
    links = [step.join_field for step in question.model._meta.get_path_to_parent(parent)]
    if all(link.primary_key for link in links):
        return pk
    # Asked by itself and not as a subquery, whose rows MariaDB would lock as well. The row is
    # locked, so that the answer stays.
    row = QuerySet[Any](question.model, using=question.using).filter(pk=pk)
    return row.values_list(LOOKUP_SEP.join(link.name for link in links), flat=True).first()


def _locking(queryset: QuerySet[Any, R], using: str) -> QuerySet[Any, R]:
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


def _answer(question: Question[M], pk: Any) -> M | Miss:
    """Ask the whole question of a row that is locked."""
    asked = question.of(pk)
    added = [*asked.query.annotation_select, *asked.query.extra_select]
    # A to-many join gives a row once per match: the same row, but for what is annotated.
    rows = list(asked if added else asked[:1])
    for name in added:
        if any(getattr(row, name) != getattr(rows[0], name) for row in rows[1:]):
            raise InvalidPending(
                f"{question.model._meta.label}: expected pending to have one answer for each row, "
                f"got row {pk} {len(rows)} times with different values of {name!r}; aggregate it, "
                "or take it from a subquery."
            )
    return rows[0] if rows else Miss.STALE
