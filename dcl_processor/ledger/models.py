"""The tables, and how their rows are reached.

No row of the user's work is in them: they may be emptied at any time.

Times are by the database's clock. No column that is written every second has an index, so that
PostgreSQL writes such a row again on its own page (a heap-only tuple), and no index grows.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from django.db import IntegrityError, connections, models, router, transaction
from django.db.models import QuerySet

from dcl_processor.operator.time_limit import lock_timeout
from dcl_processor.worker import HOST

#: Characters: of a processor's name, a person, and a text.
NAME, PERSON, TEXT = 255, 150, 500

#: Seconds that a statement of an order waits for a lock of another session.
LOCK_WAIT = 10.0


class Control(models.Model):
    """What operators want of a processor, and the limits that its workers keep together.

    The row whose ``processor`` is empty is for all processors: it has orders only.
    """

    processor = models.CharField(max_length=NAME, primary_key=True)
    paused_at = models.DateTimeField(null=True)
    paused_until = models.DateTimeField(null=True)
    paused_by = models.CharField(max_length=PERSON, default="")
    reason = models.CharField(max_length=TEXT, default="")
    #: The rate: a window of time, and the rows that were allowed to start in it.
    window = models.BigIntegerField(default=0)
    used = models.BigIntegerField(default=0)

    class Meta:
        verbose_name = "control"

    def __str__(self) -> str:
        return self.processor or "all processors"


class RecordedRun(models.Model):
    """One start of a command, or one call of ``run()``, that tried rows of a processor.

    A run that finds no row is not recorded.
    """

    #: Made at each start; a host's name and a process ID come again.
    id = models.UUIDField(primary_key=True, default=uuid.uuid4)
    processor = models.CharField(max_length=NAME)
    #: "run" or "watch", of the command; "code".
    kind = models.CharField(max_length=10)
    host = models.CharField(max_length=HOST)
    pid = models.BigIntegerField()
    started_at = models.DateTimeField()
    heartbeat_at = models.DateTimeField()
    finished_at = models.DateTimeField(null=True)
    #: Rows, by the names that a report has for them.
    counts = models.JSONField(default=dict)
    #: Why it ended, as in a report; empty while it goes on.
    stopped = models.CharField(max_length=20, default="")
    #: The last error that ended it, or that a row failed with.
    error = models.CharField(max_length=TEXT, default="")
    #: An object for each worker of the command, if there were several.
    workers = models.JSONField(default=list)
    at_work = models.BooleanField(default=True)

    class Meta:
        verbose_name = "recorded run"
        indexes = [
            models.Index(fields=["processor", "started_at"], name="dcl_ledger_processor"),
            models.Index(fields=["started_at"], name="dcl_ledger_started"),
        ]

    def __str__(self) -> str:
        return f"{self.processor} on {self.host}"


class OperatorAction(models.Model):
    """What an operator has done to rows of a processor with the command."""

    processor = models.CharField(max_length=NAME)
    #: "requeue", "mark-done" or "discard".
    action = models.CharField(max_length=20)
    by = models.CharField(max_length=PERSON)
    at = models.DateTimeField()
    #: How many rows were written to, and the first of their keys.
    rows = models.BigIntegerField()
    keys = models.CharField(max_length=TEXT, default="")
    values = models.CharField(max_length=TEXT, default="")
    reason = models.CharField(max_length=TEXT, default="")
    #: What ended it before all rows were written to, if anything did.
    error = models.CharField(max_length=TEXT, default="")

    class Meta:
        verbose_name = "operator action"
        indexes = [
            models.Index(fields=["processor", "at"], name="dcl_ledger_action"),
            models.Index(fields=["at"], name="dcl_ledger_action_at"),
        ]

    def __str__(self) -> str:
        return f"{self.action} of {self.processor} by {self.by}"


class Look(models.Model):
    """When a host has last looked for rows of a processor."""

    processor = models.CharField(max_length=NAME)
    host = models.CharField(max_length=HOST)
    looked_at = models.DateTimeField()

    class Meta:
        verbose_name = "look"
        constraints = [
            models.UniqueConstraint(fields=["processor", "host"], name="dcl_ledger_look")
        ]

    def __str__(self) -> str:
        return f"{self.processor} on {self.host}"


# --- where the tables are, their rows, and what all that is read from them has


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
