"""What a definition says of keys, and what their columns have to be."""

from __future__ import annotations

from typing import Any

from django.db import connections
from django.db.models import (
    BooleanField,
    CharField,
    DateField,
    DateTimeField,
    IntegerField,
    Model,
    Q,
    QuerySet,
    TextField,
    UUIDField,
)

from dcl_processor.keys.claim import Claims, Limit, Mark
from dcl_processor.keys.window import Reads
from dcl_processor.options.model_columns import in_parents_table
from dcl_processor.options.options import Definition
from dcl_processor.pending.clock import DatabaseNow
from dcl_processor.pending.question import order_of
from dcl_processor.report.exceptions import InvalidOption, InvalidPending, Unsupported
from dcl_processor.report.values import constants_of

#: Columns whose equal values have one spelling.
KINDS = (IntegerField, UUIDField, BooleanField, DateField, CharField, TextField)


def claims_of(processor: Definition[Any], model: type[Model], using: str) -> Claims | None:
    """Return what the claims of a processor with keys are; ``None``: no limit is asked for.

    Raises ``InvalidOption`` and ``Unsupported``.
    """
    limits, column = list[Limit](), None
    if processor.max_in_flight is not None:
        _refuse_composite(processor, "max_in_flight", model)
        limits.append(Limit(processor.max_in_flight, has_key=False))
    if processor.group_by is not None:
        column = column_of(processor, "group_by", model)
        limits.append(Limit(processor.most_of_a_key or 1, in_order=processor.in_order))
    if limits and connections[using].vendor == "mysql":
        option = "group_by" if column else "max_in_flight"
        raise Unsupported(
            f"{processor.name}: expected {option} on PostgreSQL or SQLite, whose locks can be "
            f"those of keys, got {using!r}, on MariaDB or MySQL; leave {option} out."
        )
    if not limits:
        return None
    return Claims(model, column, tuple(limits), mark_of(processor), using, processor.name)


def mark_of(processor: Definition[Any]) -> Mark | None:
    """Return what recognises a row in flight; ``None``: the locks of its claim are still held."""
    if processor.is_transactional:
        return None
    if processor.lease is not None:
        has_lease = Q(**{f"{processor.lease.field}__isnull": False})
        return Mark(has_lease, Q(**{f"{processor.lease.field}__lte": DatabaseNow()}))
    is_claimed = {f"{processor.claimed_at}__isnull": False}
    return Mark(Q(**constants_of(processor.claim or {}), **is_claimed))


def reads_of(processor: Definition[Any], model: type[Model], using: str) -> Reads | None:
    """Return how the rows of a processor are read by key; ``None``: keys take no turns."""
    option = "group_by" if processor.group_by else "fair_by"
    if getattr(processor, option) is None:
        return None
    column = column_of(processor, option, model)
    return Reads(column, processor.in_order, mark_of(processor), using)


def column_of(processor: Definition[Any], option: str, model: type[Model]) -> str:
    """Return the ``attname`` of the column of a key; raises ``InvalidOption``."""
    _refuse_composite(processor, option, model)
    name = getattr(processor, option)
    columns = {name: f for f in model._meta.concrete_fields for name in (f.name, f.attname)}
    column: Any = columns.get(name)
    named = f"{processor.name}: expected {option}={name!r} to name"
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
    return str(column.attname)


def _refuse_composite(processor: Definition[Any], option: str, model: type[Model]) -> None:
    """Raise ``InvalidOption`` for rows that no single column names."""
    if len(model._meta.pk_fields) > 1:
        raise InvalidOption(
            f"{processor.name}: expected a model with a primary key of one column for {option}, "
            f"whose claims name each row by it, got {model._meta.label} with "
            f"{', '.join(f.name for f in model._meta.pk_fields)}; leave {option} out, or give the "
            "model a primary key of one column."
        )


def refuse_order(processor: Definition[Any], pending: QuerySet[Any, Any]) -> None:
    """Raise ``InvalidPending`` unless rows in order are ordered by their own columns."""
    meta, extra = pending.model._meta, pending.query.extra_order_by
    # By its name, a relation would be in the order of its own model.
    columns = {"pk", *(field.attname for field in meta.concrete_fields)}
    order = [*order_of(pending), *(f"extra(order_by={each!r})" for each in extra)]
    wrong = [each for each in order if str(each).lstrip("-+") not in columns]
    if processor.in_order and wrong:
        raise InvalidPending(
            f"{processor.name}: expected pending with in_order to be ordered by columns of "
            f"{meta.label} itself, such as order_by('created_at'), got {wrong[0]!r}; name a "
            "column, and a relation by its column, such as 'customer_id'."
        )
