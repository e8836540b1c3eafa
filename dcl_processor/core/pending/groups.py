"""Groups: rows of one key are handled one at a time, in order if that is asked for.

A key is a condition of the question, checked under the locks of the row and of the key.
"""

from __future__ import annotations

import operator
from functools import reduce
from typing import Any

from django.db import connections
from django.db.models import (
    BooleanField,
    CharField,
    Count,
    DateField,
    DateTimeField,
    Exists,
    IntegerField,
    Model,
    OuterRef,
    Q,
    QuerySet,
    Subquery,
    TextField,
    UUIDField,
    Value,
)
from django.db.models.functions import Coalesce
from django.db.models.lookups import LessThan

from dcl_processor.core.options.model_columns import in_parents_table
from dcl_processor.core.options.options import Definition
from dcl_processor.core.pending.question import order_of
from dcl_processor.core.report.exceptions import InvalidOption, InvalidPending, Unsupported
from dcl_processor.core.report.values import constants_of

#: Columns whose equal values have one spelling.
KINDS = (IntegerField, UUIDField, BooleanField, DateField, CharField, TextField)


class Groups:
    """The rules for the keys of a processor with ``group_by``.

    ``column``: the attname of the key; ``most``: rows in flight per key.
    """

    def __init__(self, processor: Definition[Any], model: type[Model], using: str) -> None:
        self._processor, self._model = processor, model
        self.column = _key_column(processor, model).attname
        self.most = processor.max_per_group or 1
        if connections[using].vendor == "mysql":
            raise Unsupported(
                f"{processor.name}: expected group_by on PostgreSQL or SQLite, whose locks can be "
                f"those of keys, got {using!r}, on MariaDB or MySQL; leave group_by out."
            )

    def narrowed(self, queryset: QuerySet[Any, Any], unfiltered: Any) -> QuerySet[Any, Any]:
        """Narrow a question to rows whose key is free, and whose turn it is."""
        in_flight = self._in_flight()
        if in_flight is not None:
            others = self._siblings(queryset.db).filter(in_flight)
            if self.most == 1:
                queryset = queryset.filter(~Exists(others))
            else:
                number = others.order_by().values(self.column).annotate(n=Count("pk")).values("n")
                free = LessThan(Coalesce(Subquery(number), Value(0)), Value(self.most))
                queryset = queryset.filter(free)
        if self._processor.in_order:
            earlier = unfiltered.order_by().filter(
                self._earlier(queryset), **{self.column: OuterRef(self.column)}
            )
            queryset = queryset.filter(~Exists(earlier))
        return queryset

    def _siblings(self, using: str) -> QuerySet[Any, Any]:
        rows = QuerySet[Any](self._model, using=using)
        return rows.filter(**{self.column: OuterRef(self.column)}).exclude(pk=OuterRef("pk"))

    def _in_flight(self) -> Q | None:
        """Return what recognises a row that was claimed and not settled; ``None``: its lock."""
        lease, at = self._processor.lease, self._processor.claimed_at
        if lease is not None:
            # A row whose worker died holds its key until it is taken over itself.
            return Q(**{f"{lease.field}__isnull": False})
        if self._processor.is_transactional or at is None:
            return None
        return Q(**constants_of(self._processor.claim or {}), **{f"{at}__isnull": False})

    def _earlier(self, queryset: QuerySet[Any, Any]) -> Q:
        """Return the condition for siblings that come before the row."""
        order = [*_plain_order(queryset, self._processor.name), ("pk", False)]
        ways, equal = [], Q()
        for name, descends in order:
            ways.append(equal & Q(**{f"{name}__{'gt' if descends else 'lt'}": OuterRef(name)}))
            equal &= Q(**{name: OuterRef(name)})
        return reduce(operator.or_, ways)

    def lock_sql(self, key: str) -> str:
        """Return the condition that locks a key, or one of its places; ``key``: its SQL."""
        name = f"{self._model._meta.db_table}.{self.column}:".replace("'", "''").replace("%", "%%")
        places = [
            f"pg_try_advisory_xact_lock(hashtextextended('{name}' || {key}::text, {at}))"
            for at in range(self.most)
        ]
        return f"({key}::text IS NULL OR {' OR '.join(places)})"

    def wait_sql(self) -> str:
        """Return the statement that waits for the lock of a key, its parameter."""
        name = f"{self._model._meta.db_table}.{self.column}:"
        calls = [
            f"pg_advisory_xact_lock(hashtextextended('{name}' || %s::text, {at}))"
            for at in range(self.most)
        ]
        return f"SELECT {', '.join(calls)}"


def _plain_order(queryset: QuerySet[Any, Any], label: str) -> list[tuple[str, bool]]:
    found = []
    for each in order_of(queryset):
        name = (
            each
            if isinstance(each, str)
            else getattr(getattr(each, "expression", None), "name", "")
        )
        descends = (
            name.startswith("-") if isinstance(each, str) else getattr(each, "descending", False)
        )
        columns = {f.attname for f in queryset.model._meta.concrete_fields}
        columns |= {f.name for f in queryset.model._meta.concrete_fields if not f.is_relation}
        if name.lstrip("-") not in columns | {"pk"}:
            raise InvalidPending(
                f"{label}: expected an order_by() of columns of the model itself with in_order, "
                f"got {each!r}; name a relation by its column, such as customer_id."
            )
        found.append((name.lstrip("-"), descends))
    return found


def _key_column(processor: Definition[Any], model: type[Model]) -> Any:
    columns = {name: f for f in model._meta.concrete_fields for name in (f.name, f.attname)}
    column: Any = columns.get(processor.group_by or "")
    named = f"{processor.name}: expected group_by={processor.group_by!r} to name"
    if column is None:
        raise InvalidOption(
            f"{named} a column or a forward relation of {model._meta.label}, got no such column; "
            f"the columns are {', '.join(f.name for f in model._meta.concrete_fields)}."
        )
    if sentence := in_parents_table(model, column):
        raise InvalidOption(f"{named} a column {sentence}")
    target = column
    while target.remote_field:
        target = target.target_field
    collation = getattr(target, "db_collation", None)
    if not isinstance(target, KINDS) or isinstance(target, DateTimeField) or collation:
        kind = f"a {type(target).__name__}{f' with db_collation={collation!r}' * bool(collation)}"
        raise InvalidOption(
            f"{named} a column of whole numbers, UUIDs, dates, booleans or texts without a "
            f"collation of their own, where equal keys have one spelling, got {kind}; name another "
            "column."
        )
    return column
