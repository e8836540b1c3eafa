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

from dcl_processor.keys.claim import Claims, Mark, lock_number
from dcl_processor.keys.window import Reads
from dcl_processor.options.model_columns import in_parents_table
from dcl_processor.options.options import Definition
from dcl_processor.pending.clock import DatabaseNow
from dcl_processor.pending.question import ask
from dcl_processor.report.exceptions import (
    InvalidOption,
    InvalidPending,
    OutsideTransaction,
    Unsupported,
)
from dcl_processor.report.values import constants_of
from dcl_processor.sql.session import lock_database

#: Columns whose equal values have one spelling.
KINDS = (IntegerField, UUIDField, BooleanField, DateField, CharField, TextField)


def claims_of(processor: Definition[Any], model: type[Model], using: str) -> Claims | None:
    """Return what the claims of a processor with keys are; ``None``: no limit is asked for.

    Raises ``InvalidOption`` and ``Unsupported``.
    """
    most = processor.most_of_a_key or processor.max_in_flight
    if most is None:
        return None
    option, column = "max_in_flight", None
    if processor.group_by is not None:
        option, column = "group_by", column_of(processor, "group_by", model)
    _refuse_composite(processor, option, model)
    if connections[using].vendor == "mysql":
        raise Unsupported(
            f"{processor.name}: expected {option} on PostgreSQL or SQLite, whose locks can be "
            f"those of keys, got {using!r}, on MariaDB or MySQL; leave {option} out."
        )
    mark, in_order = mark_of(processor), processor.in_order
    return Claims(model, column, mark, using, most, in_order, processor.name)


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
    order = [*pending.query.order_by, *(f"extra(order_by={each!r})" for each in extra)]
    wrong = [each for each in order if str(each).lstrip("-+") not in columns]
    if processor.in_order and wrong:
        raise InvalidPending(
            f"{processor.name}: expected pending with in_order to be ordered by columns of "
            f"{meta.label} itself, such as order_by('created_at'), got {wrong[0]!r}; name a "
            "column, and a relation by its column, such as 'customer_id'."
        )


def lock_key(processor: Definition[Any], key: Any, using: str | None) -> None:
    """Wait for the lock of a key, until the transaction ends."""
    asked = ask(processor.pending, label=processor.name, using=using or processor.using)
    claims = claims_of(processor, asked.model, asked.using)
    if claims is None or claims.column is None:
        raise InvalidOption(f"{processor.name}: expected group_by=… for lock_key(), got none.")
    connection = connections[asked.using]
    if not connection.in_atomic_block:
        raise OutsideTransaction(
            f"{processor.name}: expected lock_key() inside transaction.atomic(), at whose end the "
            "lock ends, got none; call it in the block that inserts the rows."
        )
    field: Any = asked.model._meta.get_field(claims.column)
    is_row = isinstance(key, field.related_model or ())
    value = field.get_prep_value(getattr(key, field.target_field.attname) if is_row else key)
    if value is None:
        raise InvalidOption(
            f"{processor.name}: expected lock_key() to take a key, or a saved row, got {key!r}."
        )
    if not claims.has_locks:
        lock_database(asked)
        return
    first = lock_number(asked.model._meta.db_table, claims.column, value)
    with connection.cursor() as cursor:
        # Each place of the key, in their order: two callers wait for each other at the first.
        for number in range(first, first + (processor.max_per_group or 1)):
            cursor.execute("SELECT pg_advisory_xact_lock(%s::bigint)", [number])
