"""Locks of some rows, and nothing else.

A claim, and the renewal of leases, skip the rows that other sessions have locked. A late renewal
and an operator's request wait for the lock, because their rows must be written in any case.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any

from django.db import connections, transaction
from django.db.models import Model

from dcl_processor.candidates.question import Question, these

from .isolation import ReadCommitted


def lock_free(question: Question[Any], pks: Sequence[Any]) -> list[Any]:
    """Lock those of the rows that are not locked, and return their keys; checks nothing else.

    A database without row locks is locked as a whole.
    """
    features = connections[question.using].features
    if not features.has_select_for_update:
        lock_database(question)
        return list(pks)
    skips = features.has_select_for_update_skip_locked
    locked = keys_in(question.model, _lock(question, pks, skip_locked=skips))
    return [pk for pk in pks if pk in locked]


def lock_rows(question: Question[Any], pks: Sequence[Any]) -> None:
    """Lock the rows, and wait for each of them."""
    if not connections[question.using].features.has_select_for_update:
        lock_database(question)
        return
    _lock(question, pks)


def _lock(question: Question[Any], pks: Collection[Any], **how: Any) -> list[Any]:
    """Lock the rows, and return the columns of their keys."""
    columns = [field.attname for field in question.model._meta.pk_fields]
    locking = (
        question.table.filter(these(pks))
        .order_by(*columns)
        .select_for_update(
            # The lock that an UPDATE of plain columns takes: other sessions can insert child rows.
            no_key=connections[question.using].features.has_select_for_no_key_update,
            **how,
        )
    )
    return list(locking.values_list(*columns))


def keys_in(model: type[Model], rows: Sequence[Any]) -> set[Any]:
    """Return the keys in rows that begin with the columns of their key."""
    number = len(model._meta.pk_fields)
    return {row[:number] if number > 1 else row[0] for row in rows}


def lock_database(question: Question[Any]) -> None:
    """Take the only lock of a database without row locks."""
    with connections[question.using].cursor() as cursor:
        cursor.execute(database_lock(question))


def database_lock(question: Question[Any]) -> str:
    """Return the statement that takes it."""
    # SQLite has one lock, for writing, and grants it at once only to a transaction that begins with
    # a write, here an update that matches no row. After a read, the later write could fail.
    quote, meta = connections[question.using].ops.quote_name, question.model._meta
    table, column = quote(meta.db_table), quote(str(meta.pk_fields[0].column))
    return f"UPDATE {table} SET {column} = {column} WHERE 1 = 0"  # noqa: S608  # quoted


def settlement_transaction(using: str) -> AbstractContextManager[None]:
    """Open a transaction at READ COMMITTED, or a savepoint if a transaction is open."""
    inside = connections[using].in_atomic_block
    return transaction.atomic(using=using) if inside else ReadCommitted(using)
