"""Locks that a writer waits for, because its rows must be written in any case.

A claim skips the rows that other sessions have locked. A settlement, a late renewal and an
operator's request wait for the lock.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from django.db import connections, transaction
from django.db.models import Model, QuerySet

from dcl_processor.candidates.question import Question, these

from .claiming import lock_database, parent_keys
from .isolation import RowTransaction


def holders(model: type[Model], columns: Iterable[str]) -> list[type[Model]]:
    """Return the models whose tables hold these columns of a row: its own, or parents' tables.

    They are in the order in which a claim locks them, so that there is no deadlock with a claim.
    """
    named = {*columns}
    fields = [f for f in model._meta.concrete_fields if {f.name, f.attname} & named]
    tables = {field.model._meta.concrete_model for field in fields}
    return [each for each in (model, *model._meta.all_parents) if each in tables]


@contextmanager
def settling(
    question: Question[Any], pks: Sequence[Any], columns: Collection[str]
) -> Iterator[None]:
    """Make the statements for all tables of a row one atomic write.

    If the columns are in the model's own table this does nothing: one UPDATE checks and writes.
    """
    tables = holders(question.model, columns)
    if tables == [question.model]:
        yield
        return
    with settlement_transaction(question.using):
        # Race: lost lease that writes. Django writes to several tables with a SELECT and an UPDATE
        # for each table. Without the lock another worker could take the row in between.
        for table in (question.model, *(each for each in tables if each is not question.model)):
            lock_rows(question, table, pks)
        yield


@contextmanager
def settlement_transaction(using: str) -> Iterator[None]:
    """Open a transaction at READ COMMITTED, or a savepoint if a transaction is open."""
    inside = connections[using].in_atomic_block
    with transaction.atomic(using=using) if inside else RowTransaction(using):
        yield


def lock_rows(question: Question[Any], table: type[Model], pks: Sequence[Any]) -> None:
    """Lock the rows' parts in one table, their own or a parent's, and wait for each of them."""
    connection = connections[question.using]
    if not connection.features.has_select_for_update:
        lock_database(question)
        return
    keys = pks if table is question.model else [*parent_keys(question, table, pks).values()]
    columns = [field.attname for field in table._meta.pk_fields]
    rows = QuerySet[Any](table, using=question.using).filter(these(keys))
    locking = rows.order_by(*columns).select_for_update(
        no_key=connection.features.has_select_for_no_key_update
    )
    list(locking.values_list(*columns))


@contextmanager
def lock_timeout(using: str, seconds: float) -> Iterator[None]:
    """Limit the time that a block's statements, in a transaction, wait for locks."""
    connection: Any = connections[using]
    before, after = _limits(connection, seconds)
    with connection.cursor() as cursor:
        if before:
            cursor.execute(before)
        try:
            yield
        finally:
            if after:
                cursor.execute(after)


def _limits(connection: Any, seconds: float) -> tuple[str, str]:
    if connection.vendor == "postgresql":
        return f"SET LOCAL lock_timeout = {max(1, int(seconds * 1000))}", ""
    if connection.vendor != "mysql":
        return "", ""
    # MySQL's timeout has whole seconds only.
    name, value = (
        ("max_statement_time", f"{seconds:.3f}")
        if connection.mysql_is_mariadb
        else ("innodb_lock_wait_timeout", str(math.ceil(seconds)))
    )
    # The session's own value may be another one than the server's default.
    return (
        f"SET @dcl_{name} = @@SESSION.{name}, SESSION {name} = {value}",
        f"SET SESSION {name} = @dcl_{name}",
    )
