"""The index that serves the lock-free read of a question.

A partial index of the pending rows alone is as small as the backlog. Its condition has to follow
from the question whenever that is asked, so only comparisons with constants are a part of it. A
column that is compared with the time, which changes from read to read, is indexed instead. The
conditions of ``due``, which compare with the database's clock as well, filter what the index
returns; with a column of theirs in the index, every attempt and every renewal would write to it.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterator, Sequence
from datetime import date, time, timedelta
from decimal import Decimal
from functools import reduce
from typing import Any
from uuid import UUID

from django.db.models import F, Index, Model, Q, Value
from django.db.models.expressions import Col
from django.db.models.functions import Now
from django.db.models.sql import Query
from django.db.models.sql.where import AND, OR, WhereNode

from dcl_processor.keys.columns import column_of
from dcl_processor.options.options import Definition
from dcl_processor.pending.clock import DatabaseNow
from dcl_processor.pending.question import Question, order_of

#: Lookups that compare a column's value with others.
_COMPARISONS = frozenset({"exact", "in", "gt", "gte", "lt", "lte", "range"})

#: The types of the constants that can be written into a model's ``Meta``.
_CONSTANTS = (type(None), bool, int, float, Decimal, str, bytes, UUID, timedelta)

#: Values that are read from no table.
_CLOCKS = (Value, Now, DatabaseNow, date, time)

#: Characters: the longest name that every database accepts, and the part that depends on the index.
_LONGEST_NAME, _DIGEST = 30, 6

_LISTS = (list, tuple, set, frozenset)


class _NotConstantError(Exception):
    """A condition cannot be a part of an index's condition."""


def suggested(processor: Definition[Any], question: Question[Any]) -> tuple[Index | None, ...]:
    """Return the index of the lock-free read, and then that of the rows of a key at work, if any.

    ``None``: no index can serve the read. Sends no query.
    """
    option = "group_by" if processor.group_by is not None else "fair_by"
    if getattr(processor, option) is None:
        return (pending_index(question),)
    model = question.model
    field: Any = model._meta.get_field(column_of(processor, option, model))
    read, mark = pending_index(question, key=field.name), processor.claimed_at
    mark = processor.lease.field if processor.lease is not None else mark
    if option == "fair_by" or mark is None:
        return (read,)
    return read, _index(model, [field.name], Q(**{f"{mark}__isnull": False}), "in_flight")


def pending_index(question: Question[Any], *, key: str | None = None) -> Index | None:
    """Return the index of the model's table that serves the lock-free read of the question.

    ``key``: a run reads the values of this field, then the rows of each in the queryset's order, so
    the index begins with it. ``None``: no condition of the question compares a column of this table
    with a constant or with the time.
    """
    query, constant, moving = question.unfiltered.query, list[Q](), list[str]()
    for node in _demanded(query.where):
        try:
            constant.append(_condition(node, query.base_table))
        except _NotConstantError:
            moving += _moving(node, query.base_table)
    condition = reduce(operator.and_, constant) if constant else None
    if key is not None:
        return _index(question.model, [key, *_order(question)], condition)
    first = (_order(question) if constant else []) or moving
    return _index(question.model, first, condition) if constant or first else None


def _index(model: type[Model], first: Sequence[str], condition: Q | None, kind: str = "") -> Index:
    """Return the index of these columns and the primary key, each once."""
    columns = {name.lstrip("-"): name for name in reversed(first)}
    key = [each.name for each in model._meta.pk_fields if each.name not in columns]
    fields = [*dict.fromkeys(columns[name.lstrip("-")] for name in first), *key]
    # The same for the same index, and another one for another index, in each process.
    digest = hashlib.sha256(repr((fields, condition)).encode()).hexdigest()[:_DIGEST]
    ending = f"_{kind or 'pending'}_{digest}"
    # A name must not begin with an underscore.
    name = str(model._meta.model_name).strip("_")[: _LONGEST_NAME - len(ending)] + ending
    return Index(fields=fields, condition=condition, name=name)


def is_declared(index: Index, model: type[Model]) -> bool:
    """Return whether the model's ``Meta`` has such an index, whatever its name."""
    return any(
        (type(each), each.fields, each.condition) == (Index, index.fields, index.condition)
        for each in model._meta.indexes
    )


def source(index: Index) -> str:
    """Return the index as Python code for a model's ``Meta.indexes``, as a migration writes it."""
    lines = [f"    {name}={code},\n" for name, (code, _) in _serialized(index).items()]
    return f"models.Index(\n{''.join(lines)})"


def imports(index: Index) -> list[str]:
    """Return the import statements that the code of ``source()`` needs."""
    needed = {line for _, lines in _serialized(index).values() for line in lines}
    return sorted({"from django.db import models", *needed})


def _serialized(index: Index) -> dict[str, tuple[str, set[str]]]:
    """Return the arguments of the index as Python code, with the imports that the code needs."""
    from django.db.migrations.writer import MigrationWriter  # not for the start of each process

    options = {"fields": index.fields, "condition": index.condition, "name": index.name}
    return {n: MigrationWriter.serialize(each) for n, each in options.items() if each is not None}


# --- the conditions of the question


def _demanded(node: Any) -> Iterator[Any]:
    """Yield the conditions that each pending row meets."""
    if isinstance(node, WhereNode) and node.connector == AND and not node.negated:
        for child in node.children:
            yield from _demanded(child)
    else:
        yield node


def _column(expression: Any, table: str | None) -> str | None:
    """Return the name of the field, if the expression is a column of the table."""
    is_own = type(expression) is Col and expression.alias == table
    return str(expression.target.name) if is_own else None


def _condition(node: Any, table: str | None) -> Q:
    """Return a condition as it was written; raises unless all of it is constant."""
    if isinstance(node, WhereNode):
        together = {AND: operator.and_, OR: operator.or_}.get(node.connector)
        if together is None or not node.children:
            raise _NotConstantError
        condition = reduce(together, (_condition(each, table) for each in node.children))
        return ~condition if node.negated else condition
    name = _column(getattr(node, "lhs", None), table)
    # A lookup that a user registered may compile to any SQL.
    if name is None or not type(node).__module__.startswith("django.db.models."):
        raise _NotConstantError
    asked = f"{name}__{node.lookup_name}".removesuffix("__exact")
    if not isinstance(node.rhs, _LISTS):
        return Q(**{asked: _constant(node.rhs, table)})
    values = [_constant(each, table) for each in node.rhs]
    # A set has another order in each process, and the name of the index depends on the order.
    is_set = isinstance(node.rhs, (set, frozenset))
    return Q(**{asked: sorted(values, key=repr) if is_set else values})


def _constant(value: Any, table: str | None) -> Any:
    if name := _column(value, table):
        return F(name)
    if isinstance(value, str):
        value = str.__str__(value)  # also of a class of the user's
    if type(value) not in _CONSTANTS:
        raise _NotConstantError
    return value


def _moving(node: Any, table: str | None) -> Iterator[str]:
    """Yield the column that a condition compares with values that are read from no table."""
    name = _column(getattr(node, "lhs", None), table)
    if name is not None and node.lookup_name in _COMPARISONS:
        values = node.rhs if isinstance(node.rhs, _LISTS) else [node.rhs]
        yield from [name] * all(map(_reads_no_table, values))


def _reads_no_table(value: Any) -> bool:
    if isinstance(value, (*_CLOCKS, *_CONSTANTS)):
        return True
    if isinstance(value, Query):
        return False
    parts: Any = getattr(value, "get_source_expressions", list)()
    return bool(parts) and all(map(_reads_no_table, parts))


def _order(question: Question[Any]) -> list[str]:
    """Return the columns of the table that the order begins with, as an index names them."""
    meta = question.model._meta
    columns = {name: f.name for f in meta.local_concrete_fields for name in (f.name, f.attname)}
    columns["pk"] = meta.pk_fields[0].name
    found: list[str] = []
    for each in order_of(question.queryset):
        name = each.lstrip("-+") if isinstance(each, str) else ""
        if name not in columns:
            break
        found.append(f"-{columns[name]}" if each.startswith("-") else columns[name])
    return found
