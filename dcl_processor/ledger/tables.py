"""Where the ledger's tables are, their rows, and what all that is read from them has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

from django.db import IntegrityError, connections, router, transaction
from django.db.models import QuerySet
from django.utils import timezone

from dcl_processor.database.time_limit import lock_timeout

from .models import Control

Time = TypeVar("Time", bound=datetime | None)

#: Seconds that a statement of an order waits for a lock of another session.
LOCK_WAIT = 10.0


def alias() -> str:
    """Return the database that has the ledger's tables: that to which the router writes them."""
    using: str = router.db_for_write(Control)
    return using


def row_of(name: str) -> QuerySet[Control]:
    """Return the row of a processor, as a queryset."""
    return Control.objects.using(alias()).filter(processor=name)


@contextmanager
def bounded_wait() -> Iterator[None]:
    """Open a transaction for one statement, which waits ``LOCK_WAIT`` seconds for a lock.

    A transaction of the caller keeps its own limits, and SQLite that of its option ``timeout``. It
    is for one statement, because two orders that lock several rows, each in its own order, would
    wait in a ring.
    """
    using = alias()
    connection = connections[using]
    if connection.in_atomic_block or not connection.features.has_select_for_update:
        yield
        return
    with transaction.atomic(using=using), lock_timeout(using, LOCK_WAIT):
        yield


def ensure(name: str) -> None:
    """Make the row of a processor, if there is none."""
    # Another worker, or an operator, may make it at the same time, and an older snapshot lack it.
    with suppress(IntegrityError), bounded_wait():
        Control.objects.using(alias()).get_or_create(processor=name)


def utc(at: Time) -> Time:
    """Return a time of the ledger in UTC."""
    if at is None:
        return at
    zone = timezone.get_default_timezone()
    aware: Any = timezone.make_aware(at, zone) if at.tzinfo is None else at
    return aware.astimezone(UTC)  # type: ignore[no-any-return]  # a datetime


@dataclass(frozen=True, slots=True)
class Plain:
    """A value that can be shown as JSON."""

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, which ``json.dumps()`` accepts; times as ISO 8601."""
        found: dict[str, Any] = _plain(asdict(self))
        return found


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return value.isoformat() if isinstance(value, datetime) else value
