"""The lock of a key, for code that is no worker."""

from __future__ import annotations

from typing import Any

from django.db import connections

from dcl_processor.keys import columns
from dcl_processor.keys.claim import lock_number
from dcl_processor.options.options import Definition
from dcl_processor.pending.question import ask
from dcl_processor.report.exceptions import InvalidOption, OutsideTransaction
from dcl_processor.sql.session import lock_database


def lock_key(processor: Definition[Any], key: Any, using: str | None) -> None:
    """Wait for the lock of a key, until the transaction ends."""
    asked = ask(processor.pending, label=processor.name, using=using or processor.using)
    claims = columns.claims_of(processor, asked.model, asked.using)
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
