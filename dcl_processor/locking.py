"""Stage 2: lock the rows, and ask again."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeVar

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


@dataclass(frozen=True, slots=True)
class Claimed(Generic[M]):
    """The rows that are ours, by primary key in the order asked for, and why others are not."""

    rows: dict[Any, M]
    misses: dict[Any, Miss]


def claim(question: Question[M], pks: Sequence[Any]) -> Claimed[M]:
    """Lock rows and return them as read under their locks.

    Never waits for a lock, where the database can do without. Runs inside the transaction that
    the rows are handled or marked in.
    """
    if not connections[question.using].features.has_select_for_update:
        return _claim_database(question, pks)
    if question.own_table:
        # Second check: another copy may have finished a row since its key was read. Lock and
        # check are one statement, and the database checks the locked row's newest version.
        return _claimed(pks, (), _locking(question.among(pks), question.using))
    return _claim_spanning(question, pks)


def _claim_spanning(question: Question[M], pks: Sequence[Any]) -> Claimed[M]:
    locked = list(pks)
    for table in question.tables:
        locked = _lock(question, table, locked)
    # Second check: the lock statement's snapshot is older than the lock, and what is joined would
    # be read from that snapshot. A statement of its own sees what was committed until now.
    return _claimed(pks, locked, question.among(locked) if locked else ())


def _claim_database(question: Question[M], pks: Sequence[Any]) -> Claimed[M]:
    # SQLite has one lock, for writing, and gives it at once only to a transaction that begins by
    # writing: an update that matches no row. A read before it would make the write fail later.
    connection = connections[question.using]
    table = connection.ops.quote_name(question.model._meta.db_table)
    column = connection.ops.quote_name(str(question.model._meta.concrete_fields[0].column))
    with connection.cursor() as cursor:
        cursor.execute(f"UPDATE {table} SET {column} = {column} WHERE 1 = 0")  # noqa: S608  # quoted
    # Second check: until the lock was got, another copy may have finished a row.
    return _claimed(pks, pks, question.among(pks))


def _claimed(pks: Sequence[Any], locked: Collection[Any], found: Iterable[M]) -> Claimed[M]:
    # A join that gives a row twice gives the same row.
    by_pk = {row.pk: row for row in found}
    missing = [pk for pk in pks if pk not in by_pk]
    return Claimed(
        rows={pk: by_pk[pk] for pk in pks if pk in by_pk},
        misses={pk: Miss.STALE if pk in locked else Miss.ABSENT for pk in missing},
    )


def _lock(question: Question[Any], table: type[Model], pks: Sequence[Any]) -> list[Any]:
    """Lock the rows' parts in one table, their own or a parent's; return those that were got."""
    owners = {pk: pk for pk in pks}
    if table is not question.model:
        path = question.model._meta.get_path_to_parent(table)
        link = LOOKUP_SEP.join(step.join_field.name for step in path)
        own: QuerySet[Any] = QuerySet(question.model, using=question.using)
        owners = dict(own.filter(pk__in=list(pks)).values_list(link, "pk"))
    parts: QuerySet[Any] = QuerySet(table, using=question.using)
    wanted = parts.filter(pk__in=list(owners)).only("pk")
    held = {owners[part.pk] for part in _locking(wanted, question.using)}
    return [pk for pk in pks if pk in held]


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
