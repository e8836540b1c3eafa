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
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import reduce
from typing import TYPE_CHECKING, Any
from uuid import UUID

from django.db.models import F, Index, Model, Q, Value
from django.db.models.expressions import Col
from django.db.models.functions import Now
from django.db.models.sql import Query
from django.db.models.sql.where import AND, OR, WhereNode

from dcl_processor.definition.groups import Groups, groups_of
from dcl_processor.pending.clock import DatabaseNow
from dcl_processor.pending.question import PLAIN_LOOKUPS, Question, demanded, order_of

if TYPE_CHECKING:
    from dcl_processor.options.options import Definition

#: Lookups that compare a column's value with others.
_COMPARISONS = frozenset({"exact", "in", "gt", "gte", "lt", "lte", "range"})

#: The types of the constants that can be written into a model's ``Meta``.
_CONSTANTS = (type(None), bool, int, float, Decimal, str, bytes, UUID, timedelta)

#: Characters: the longest name that every database accepts, and the part that depends on the index.
_LONGEST_NAME, _DIGEST = 30, 6

_LISTS = (list, tuple, set, frozenset)


class _NotConstantError(Exception):
    """A condition cannot be a part of an index's condition."""


def pending_index(
    question: Question[Any], *, group: Any = None, since: str | None = None
) -> Index | None:
    """Return the index of the model's table that serves the lock-free read of the question.

    ``group``: the field of ``group_by``. A run reads the keys, then the rows of each key in the
    queryset's order, so the index begins with this field. It is an index of the table that has the
    field.
    ``since``: a column whose smallest value in the pending rows the index is to show instead.
    ``None``: no condition of the question compares a column of this table with a constant or with
    the time. Sends no query.
    """
    if group is not None:
        return _index_of_keys(question, group)
    parts = _split(question)
    order = [since] if since else _order(question, question.model)
    first = (order if parts.constant else []) or parts.moving
    condition = reduce(operator.and_, parts.constant) if parts.constant else None
    if condition is None and not first:
        return None
    return _index(question.model, first, condition)


def _index_of_keys(question: Question[Any], group: Any) -> Index:
    """Return the index for the keys of the rows, and for the rows of a key in their order."""
    constant = _split(question).constant if group.model is question.model else []
    condition = reduce(operator.and_, constant) if constant else None
    return _index(group.model, [group.name, *_order(question, group.model)], condition)


def _index(model: type[Model], first: Sequence[str], condition: Q | None) -> Index:
    """Return the index of these columns and the primary key, each once."""
    columns = {name.lstrip("-"): name for name in reversed(first)}
    key = [each.name for each in model._meta.pk_fields if each.name not in columns]
    fields = [*dict.fromkeys(columns[name.lstrip("-")] for name in first), *key]
    return Index(fields=fields, condition=condition, name=_name(model, fields, condition))


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
    return {
        name: MigrationWriter.serialize(value)
        for name, value in options.items()
        if value is not None
    }


@dataclass(slots=True)
class _Parts:
    """The conditions of a question by what an index can do with them.

    ``constant``: those of a partial index; ``moving``: columns that are compared with the time.
    """

    constant: list[Q] = field(default_factory=list)
    moving: list[str] = field(default_factory=list)

    def sort(self, columns: _Columns, node: Any) -> None:
        """Add one condition."""
        name = columns.of(getattr(node, "lhs", None))
        try:
            self.constant.append(columns.condition(node))
        except _NotConstantError:
            if name is not None and _is_moving(node):
                self.moving.append(name)


def _split(question: Question[Any]) -> _Parts:
    query, parts = question.unfiltered.query, _Parts()
    columns = _Columns(query.base_table)
    for node in demanded(query.where):
        parts.sort(columns, node)
    return parts


class _Columns:
    """Turns conditions on the columns of one table back into ``Q`` objects."""

    def __init__(self, table: str | None) -> None:
        self._table = table

    def of(self, expression: Any) -> str | None:
        """Return the name of the field, if the expression is a column of the table."""
        is_own = type(expression) is Col and expression.alias == self._table
        return str(expression.target.name) if is_own else None

    def condition(self, node: Any) -> Q:
        """Return the condition; raises ``_NotConstantError`` unless all of it is constant."""
        if isinstance(node, WhereNode):
            return self._several(node)
        name = self.of(getattr(node, "lhs", None))
        if name is None or type(node).__module__ not in PLAIN_LOOKUPS:
            raise _NotConstantError
        lookup = "" if node.lookup_name == "exact" else f"__{node.lookup_name}"
        if not isinstance(node.rhs, _LISTS):
            return Q(**{f"{name}{lookup}": self._value(node.rhs)})
        values = [self._value(each) for each in node.rhs]
        # A set has another order in each process, and the name of the index depends on the order.
        is_set = isinstance(node.rhs, (set, frozenset))
        return Q(**{f"{name}{lookup}": sorted(values, key=repr) if is_set else values})

    def _several(self, node: WhereNode) -> Q:
        if node.connector not in (AND, OR) or not node.children:
            raise _NotConstantError
        together = operator.or_ if node.connector == OR else operator.and_
        condition = reduce(together, map(self.condition, node.children))
        return ~condition if node.negated else condition

    def _value(self, value: Any) -> Any:
        if name := self.of(value):
            return F(name)
        if type(value) is Value:
            value = value.value
        if isinstance(value, Enum):
            value = value.value
        if isinstance(value, str):
            value = str.__str__(value)  # also of a class of the user's
        if type(value) not in _CONSTANTS:
            raise _NotConstantError
        return value


def _is_moving(node: Any) -> bool:
    """Return whether a lookup compares its column with values that are read from no table."""
    values = node.rhs if isinstance(node.rhs, _LISTS) else [node.rhs]
    return node.lookup_name in _COMPARISONS and not any(map(_reads_a_table, values))


def _reads_a_table(value: Any) -> bool:
    if type(value) in (Value, Now, DatabaseNow) or isinstance(value, (date, time, *_CONSTANTS)):
        return False
    if isinstance(value, (Col, Query)) or hasattr(value, "query"):
        return True
    sources = getattr(value, "get_source_expressions", None)
    return sources is None or any(map(_reads_a_table, sources()))


def _order(question: Question[Any], model: type[Model]) -> list[str]:
    """Return the columns of a table that the order begins with, as an index names them."""
    meta = model._meta
    columns = {name: f.name for f in meta.local_concrete_fields for name in (f.name, f.attname)}
    columns["pk"] = meta.pk_fields[0].name
    found: list[str] = []
    for each in order_of(question.queryset):
        name = each.lstrip("-+") if isinstance(each, str) else ""
        if name not in columns:
            break
        found.append(f"-{columns[name]}" if each.startswith("-") else columns[name])
    return found


def _name(model: type[Model], fields: Sequence[str], condition: Q | None) -> str:
    """Return a name that is the same for the same index, and another one for another index."""
    digest = hashlib.sha256(repr((fields, condition)).encode()).hexdigest()[:_DIGEST]
    ending = f"_pending_{digest}"
    # A name must not begin with an underscore.
    return str(model._meta.model_name).strip("_")[: _LONGEST_NAME - len(ending)] + ending


# --- which indexes a processor needs: the command and the check suggest the same

#: Characters of a name's parts: a name may have 30 on every database.
_PART = 9


@dataclass(frozen=True, slots=True)
class Suggested:
    """The indexes of one processor, and the model whose ``Meta`` is to have them.

    ``model``: that of the rows, or the parent that has the column of ``group_by``. ``read``: serves
    the lock-free reads; ``None``: no index can. ``in_flight``: serves the question for the rows of
    a key that are claimed and not settled; ``None``: without ``group_by``, or without a column that
    shows it.
    """

    model: type[Model]
    read: Index | None
    in_flight: Index | None = None


def suggested(processor: Definition[Any], question: Question[Any]) -> Suggested:
    """Return the indexes for a processor; sends no query.

    Raises ``InvalidOption`` for a ``group_by`` that names no key.
    """
    if processor.group_by is None:
        index = pending_index(question)
        return Suggested(question.model, index)
    groups = groups_of(processor, question.model)
    index = pending_index(question, group=groups.field)
    return Suggested(groups.field.model, index, _in_flight(processor, groups))


def _in_flight(processor: Definition[Any], groups: Groups) -> Index | None:
    key, time = groups.field, time_in_flight(processor, groups)
    if time is None:
        return None
    name = f"{key.model._meta.model_name[:_PART]}_{key.name[:_PART]}_in_flight"
    return Index(fields=[key.name], condition=Q(**{f"{time}__isnull": False}), name=name)


def time_in_flight(processor: Definition[Any], groups: Groups) -> str | None:
    """Return the column, in the table of the key, that is not ``NULL`` while a row is in flight."""
    here = {each.name for each in groups.field.model._meta.local_concrete_fields}
    times = (processor.lease.field if processor.lease else None, processor.claimed_at)
    return next((name for name in times if name in here), None)
