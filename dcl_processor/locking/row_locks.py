"""Locks of some rows, or of their parts in the tables of parents, and nothing else.

A claim, and the renewal of leases, skip the rows that other sessions have locked. A settlement, a
late renewal and an operator's request wait for the lock, because their rows must be written in any
case.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from django.db import OperationalError, connections, transaction
from django.db.models import Model, QuerySet
from django.db.models.constants import LOOKUP_SEP

from dcl_processor.candidates.question import Question, these
from dcl_processor.database.contention import is_contention
from dcl_processor.database.time_limit import lock_timeout

from .isolation import ReadCommitted

#: Times that a writer releases the parts that it has because another one is locked; then it waits.
MOST_TURNS = 10


def lock_free(
    question: Question[Any], pks: Sequence[Any], tables: Sequence[type[Model]] = ()
) -> list[Any]:
    """Lock those of the rows that are not locked, and return their keys; checks nothing else.

    ``tables``: those that are to be written; the parts of the rows in parents' tables are locked,
    too. A database without row locks is locked as a whole.
    """
    if not connections[question.using].features.has_select_for_update:
        lock_database(question)
        return list(pks)
    locked = list(pks)
    # The row's own part first, as a claim does.
    for table in dict.fromkeys([question.model, *tables]):
        locked = _lock_free_parts(question, table, locked) if locked else []
    return locked


def _lock_free_parts(question: Question[Any], table: type[Model], pks: Sequence[Any]) -> list[Any]:
    parts = parts_of(question, table, pks)
    skips = connections[question.using].features.has_select_for_update_skip_locked
    locked = _lock(question, table, parts.values(), skip_locked=skips)
    held = rows_with(question, table, parts, locked)
    return [pk for pk in pks if pk in held]


def _lock(
    question: Question[Any], table: type[Model], keys: Collection[Any], **how: Any
) -> list[Any]:
    """Lock the parts with these keys in one table, and return the columns of their keys."""
    columns = [field.attname for field in table._meta.pk_fields]
    rows = QuerySet[Any](table, using=question.using).filter(these(keys))
    locking = rows.order_by(*columns).select_for_update(
        # The lock that an UPDATE of plain columns takes: other sessions can insert child rows.
        no_key=connections[question.using].features.has_select_for_no_key_update,
        **how,
    )
    return list(locking.values_list(*columns))


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


def parts_of(question: Question[Any], table: type[Model], pks: Sequence[Any]) -> dict[Any, Any]:
    """Return the keys of the rows' parts in one table, by the rows' own keys."""
    steps = question.model._meta.get_path_to_parent(table)
    if all(step.join_field.primary_key for step in steps):
        return dict(zip(pks, pks, strict=True))
    # A separate query, because MariaDB would lock the rows of a subquery as well. The answer stays
    # valid, because nothing moves a row to another parent.
    rows = QuerySet[Any](question.model, using=question.using).filter(these(pks))
    return dict(rows.values_list("pk", path_to_parts(question.model)[table]))


def rows_with(
    question: Question[Any], table: type[Model], parts: Mapping[Any, Any], locked: Sequence[Any]
) -> set[Any]:
    """Return the rows whose part in one table is locked.

    ``parts``: the parts' keys, by the rows' own; ``locked``: the columns of the locked parts' keys.
    """
    number = len(table._meta.pk_fields)
    held = {row[:number] if number > 1 else row[0] for row in locked}
    found = {pk for pk, key in parts.items() if key in held}
    if table is not question.model and len(found) < len(held):
        found |= _spelled_otherwise(question, table, held.difference(parts.values()))
    return found


def _spelled_otherwise(
    question: Question[Any], parent: type[Model], held: Collection[Any]
) -> set[Any]:
    """Return the rows with these parts in a parent's table, for a collation that ignores case."""
    named = QuerySet[Any](question.model, using=question.using)
    path = path_to_parts(question.model)[parent]
    return set(named.filter(**{f"{path}__in": held}).values_list("pk", flat=True))


def path_to_parts(model: type[Model]) -> dict[type[Model], str]:
    """Return the models whose tables have a part of a row, each with the path to the part's key.

    They are in the order in which ``save()`` writes them, parents first, so that a session that
    waits for them is in no deadlock with it. A claim, whose order is another one, does not wait.
    """
    found: dict[type[Model], str] = {}
    for parent, link in model._meta.parents.items():
        for table, path in path_to_parts(parent).items():
            found.setdefault(table, path if link is None else f"{link.name}{LOOKUP_SEP}{path}")
    return {**found, model: "pk"}


def written_parts(model: type[Model], columns: Iterable[str]) -> list[type[Model]]:
    """Return the models whose tables a writer of these columns locks, in the order of ``save()``.

    These are the row's own table, which a claim locks first, and the parents' that hold a column.
    """
    named = {*columns}
    fields = [f for f in model._meta.concrete_fields if {f.name, f.attname} & named]
    tables = {model, *(field.model._meta.concrete_model for field in fields)}
    return [each for each in path_to_parts(model) if each in tables]


@contextmanager
def settling(
    question: Question[Any], pks: Sequence[Any], columns: Collection[str]
) -> Iterator[None]:
    """Make the statements for all tables of a row one atomic write.

    If the columns are in the model's own table this does nothing: one UPDATE checks and writes.
    """
    tables = written_parts(question.model, columns)
    if tables == [question.model]:
        yield
        return
    # Race: lost lease that writes. Django writes to several tables with a SELECT and an UPDATE for
    # each table. Without the lock another worker could take the row in between.
    with locked_parts(question, tables, pks):
        yield


class _PartLockedError(Exception):
    """Another session has the rows' part in this table."""

    def __init__(self, table: type[Model]) -> None:
        self.table = table


@contextmanager
def locked_parts(
    question: Question[Any],
    tables: Sequence[type[Model]],
    pks: Sequence[Any],
    *,
    seconds: float | None = None,
) -> Iterator[None]:
    """Open a transaction that has the rows' parts in these tables locked.

    It waits for a part of a row only while it has no other part: if a further part is locked, the
    transaction is rolled back, and begins again with that part. So it is in no deadlock with a
    session that locks the parts of the row in another order, by ``save()`` or by a join. After
    ``MOST_TURNS`` such turns it waits for all parts. ``seconds``: the limit of each wait.
    """
    using, order = question.using, [*tables]
    for is_last in (*[False] * MOST_TURNS, True):
        try:
            limit = nullcontext() if seconds is None else lock_timeout(using, seconds)
            with settlement_transaction(using), limit:
                _lock_parts(question, order, pks, waits=is_last)
                yield
                return
        except _PartLockedError as locked:
            order.remove(locked.table)
            order.insert(0, locked.table)


def _lock_parts(
    question: Question[Any], order: Sequence[type[Model]], pks: Sequence[Any], *, waits: bool
) -> None:
    has_nowait = connections[question.using].features.has_select_for_update_nowait
    for place, table in enumerate(order):
        nowait = place > 0 and has_nowait and not waits
        try:
            lock_rows(question, table, pks, nowait=nowait)
        except OperationalError as error:
            if nowait and is_contention(error):
                raise _PartLockedError(table) from error
            raise


def settlement_transaction(using: str) -> AbstractContextManager[None]:
    """Open a transaction at READ COMMITTED, or a savepoint if a transaction is open."""
    inside = connections[using].in_atomic_block
    return transaction.atomic(using=using) if inside else ReadCommitted(using)


def lock_rows(
    question: Question[Any], table: type[Model], pks: Sequence[Any], *, nowait: bool = False
) -> None:
    """Lock the rows' parts in one table, their own or a parent's, and wait for each of them.

    ``nowait``: raise ``OperationalError`` instead.
    """
    if not connections[question.using].features.has_select_for_update:
        lock_database(question)
        return
    _lock(question, table, parts_of(question, table, pks).values(), nowait=nowait)
