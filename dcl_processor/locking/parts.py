"""Lock those of some rows that no other session has locked, and check nothing else."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from django.db import connections
from django.db.models import Model, QuerySet
from django.db.models.constants import LOOKUP_SEP

from dcl_processor.candidates.question import Question, these


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
    locked = _lock(question, question.model, pks)
    for table in tables:
        if table is not question.model:
            locked = _lock(question, table, locked)
    return locked


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
    return dict(rows.values_list("pk", _path_to(question.model, table)))


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
    path = _path_to(question.model, parent)
    return set(named.filter(**{f"{path}__in": held}).values_list("pk", flat=True))


def _path_to(model: type[Model], parent: type[Model]) -> str:
    return LOOKUP_SEP.join(step.join_field.name for step in model._meta.get_path_to_parent(parent))


def _lock(question: Question[Any], table: type[Model], pks: Sequence[Any]) -> list[Any]:
    if not pks:
        return []
    features, parts = connections[question.using].features, parts_of(question, table, pks)
    rows = QuerySet[Any](table, using=question.using).filter(these(parts.values())).order_by()
    skips = features.has_select_for_update_skip_locked
    locking = rows.select_for_update(
        skip_locked=skips,
        nowait=not skips and features.has_select_for_update_nowait,
        # The lock that an UPDATE of plain columns takes: other sessions can insert child rows.
        no_key=features.has_select_for_no_key_update,
    )
    columns = [field.attname for field in table._meta.pk_fields]
    held = rows_with(question, table, parts, list(locking.values_list(*columns)))
    return [pk for pk in pks if pk in held]
