"""The rows that workers hold, or held when they died, as far as the database shows it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.db import connections
from django.db.models import Q, QuerySet

from dcl_processor.core.keys import columns
from dcl_processor.core.keys.columns import key_value
from dcl_processor.core.keys.limits import lock_number
from dcl_processor.core.options.options import Definition
from dcl_processor.core.pending.clock import DatabaseNow
from dcl_processor.core.pending.question import ask
from dcl_processor.core.report.exceptions import InvalidOption, OutsideTransaction
from dcl_processor.core.report.values import TEN_YEARS, as_timedelta, constants_of, expect_seconds


def in_doubt(processor: Definition[Any], older_than: float | timedelta) -> QuerySet[Any, Any]:
    """Return the rows that have been claimed for longer than ``older_than``."""
    if processor.claim is None or processor.claimed_at is None:
        raise InvalidOption(
            f"{processor.name}: expected claim=… and claimed_at=… for in_doubt(), got a processor "
            "without both; add them, so that each claim records its time."
        )
    if processor.lease is not None:
        raise InvalidOption(
            f"{processor.name}: expected a processor without a lease for in_doubt(), got "
            f"{processor.lease!r}, after which another worker takes a row over; use in_progress()."
        )
    expect_seconds(f"{processor.name}: expected older_than", older_than, most=TEN_YEARS)
    since = Q(**{f"{processor.claimed_at}__lte": DatabaseNow() - as_timedelta(older_than)})
    return _rows(processor).filter(_claimed(processor), since).order_by(processor.claimed_at, "pk")


def in_progress(processor: Definition[Any]) -> QuerySet[Any, Any]:
    """Return the rows that a worker has claimed or leased, the longest-held first."""
    if processor.lease is not None:
        since = processor.claimed_at or processor.lease.field
        rows = _rows(processor).filter(_claimed(processor), processor.lease.alive())
        return rows.order_by(since, "pk")
    if processor.claim is None or processor.claimed_at is None:
        raise InvalidOption(
            f"{processor.name}: expected a lease, or claim=… and claimed_at=…, for in_progress(), "
            "got a processor without both; add them, so that each row shows that it is claimed."
        )
    return _rows(processor).filter(_claimed(processor)).order_by(processor.claimed_at, "pk")


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
    value = key_value(processor.name, field, key)
    if value is None or not claims.has_locks:
        return
    first = lock_number(asked.model._meta.db_table, claims.column, value)
    with connection.cursor() as cursor:
        # Each place of the key, in their order: two callers wait for each other at the first.
        for number in range(first, first + (processor.max_per_group or 1)):
            cursor.execute("SELECT pg_advisory_xact_lock(%s::bigint)", [number])


def _rows(processor: Definition[Any]) -> QuerySet[Any, Any]:
    return ask(processor.pending, label=processor.name, using=processor.using).table


def _claimed(processor: Definition[Any]) -> Q:
    times = {f"{processor.claimed_at}__isnull": False} if processor.claimed_at else {}
    return Q(**constants_of(processor.claim or {}), **times)
