"""How many rows of one key may be in flight, and how a row in flight is recognised."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from django.db.models import Q

from dcl_processor.options.options import Definition
from dcl_processor.pending.clock import DatabaseNow
from dcl_processor.report.values import constants_of

#: How many advisory locks a key has: one for each row of it that may be in flight.
PLACES = 4_096


@dataclass(frozen=True, slots=True)
class Limit:
    """The most rows of one key in flight; ``has_key=False``: all rows count together."""

    most: int = 1
    has_key: bool = True
    in_order: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """How a row in flight is recognised; ``lapsed``: those that another worker may take over."""

    in_flight: Q
    lapsed: Q | None = None


def limits_of(processor: Definition[Any]) -> tuple[Limit, ...]:
    """Return the limits of a processor: that of its keys, and that of all its rows."""
    found = []
    if processor.group_by is not None:
        most = processor.max_per_group or 1
        found.append(Limit(most, has_key=True, in_order=processor.in_order))
    if processor.max_in_flight is not None:
        found.append(Limit(processor.max_in_flight, has_key=False))
    return tuple(found)


def mark_of(processor: Definition[Any]) -> Mark | None:
    """Return what recognises a row in flight; ``None``: the locks of its claim are still held."""
    lease, at = processor.lease, processor.claimed_at
    if lease is not None:
        has_lease = Q(**{f"{lease.field}__isnull": False})
        return Mark(has_lease, Q(**{f"{lease.field}__lte": DatabaseNow()}))
    if processor.is_transactional:
        return None
    return Mark(Q(**constants_of(processor.claim or {}), **{f"{at}__isnull": False}))


def lock_number(table: str, column: str, value: Any) -> int:
    """Return the first lock of a key; the ``PLACES`` numbers from there are its own.

    Two keys with the same number exclude each other: that costs time, and breaks no limit.
    """
    words = ("dcl_processor", table, column, str(value))
    digest = blake2b("\0".join(words).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True) & -PLACES
