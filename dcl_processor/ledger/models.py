"""The tables, and how their rows are reached.

No row of the user's work is in them: they may be emptied at any time. Times are by the database's
clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any

from django.db import IntegrityError, connections, models, router, transaction
from django.db.models import QuerySet

from dcl_processor.operator.time_limit import time_limit
from dcl_processor.operator.times import utc
from dcl_processor.options.options import Definition
from dcl_processor.report.exceptions import InvalidOption
from dcl_processor.report.values import expect_type

#: Characters: of a processor's name, of who did it, of why a run ended, and of a text.
NAME, PERSON, REASON, TEXT = 255, 150, 100, 500

#: Seconds that a statement of an operator, and of a run, waits for a lock of another session.
LOCK_WAIT, RUN_WAIT = 10.0, 1.0


class Control(models.Model):
    """The pause of a processor, and the tokens of its rate.

    The row whose ``processor`` is empty is for all processors, and has a pause only.
    """

    processor = models.CharField(max_length=NAME, primary_key=True)
    paused_at = models.DateTimeField(null=True)
    paused_until = models.DateTimeField(null=True)
    paused_by = models.CharField(max_length=PERSON, default="")
    reason = models.CharField(max_length=TEXT, default="")
    #: A window of time, and the rows that were allowed to start in it.
    window = models.BigIntegerField(default=0)
    used = models.BigIntegerField(default=0)

    class Meta:
        verbose_name = "control"

    def __str__(self) -> str:
        return self.processor or "all processors"


class Record(models.Model):
    """What runs of a processor have done in one process, or what an operator has done to it.

    ``action``: "run"; or "pause", "resume", "requeue", "mark-done", "discard". ``by``: a worker's
    name, or an operator's. ``at``, ``seen_at``: when it began, and was written last. ``rows``: that
    were tried, or written to. ``counts``: of a run, those of its report that are not 0.
    ``stopped``: why it ended, empty until then. ``error``: what ended it, or the first of a row.
    ``keys``, ``values``, ``reason``: of an action, the first keys, what was set, and why.
    """

    processor = models.CharField(max_length=NAME)
    action = models.CharField(max_length=20)
    by = models.CharField(max_length=PERSON)
    at = models.DateTimeField()
    seen_at = models.DateTimeField()
    rows = models.BigIntegerField(default=0)
    counts = models.JSONField(default=dict)
    stopped = models.CharField(max_length=REASON, default="")
    error = models.CharField(max_length=TEXT, default="")
    keys = models.CharField(max_length=TEXT, default="")
    values = models.CharField(max_length=TEXT, default="")
    reason = models.CharField(max_length=TEXT, default="")

    class Meta:
        verbose_name = "record"
        indexes = [
            models.Index(fields=["processor", "action", "seen_at"], name="dcl_ledger_processor"),
            models.Index(fields=["seen_at"], name="dcl_ledger_seen"),
        ]

    def __str__(self) -> str:
        return f"{self.action} of {self.processor} by {self.by}"

    @property
    def rate(self) -> float:
        """Return the rows that were tried in a second."""
        seconds = (self.seen_at - self.at).total_seconds()
        return self.rows / seconds if seconds > 0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, which ``json.dumps()`` accepts; times as ISO 8601, in UTC."""
        names = [each.name for each in self._meta.concrete_fields if each.name != "id"]
        return plain({name: getattr(self, name) for name in names} | {"rate": round(self.rate, 3)})


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values that ``json.dumps()`` accepts."""
    return {
        name: plain(value)
        if isinstance(value, dict)
        else utc(value).isoformat()
        if isinstance(value, datetime)
        else value
        for name, value in values.items()
    }


#: All processors, in the place of one.
ALL = ""

#: A processor, or its name, or ``ALL``.
Subject = Definition[Any] | str


def name_of(processor: Subject) -> str:
    """Return the name; ``""``: all processors."""
    name = processor.name if isinstance(processor, Definition) else processor
    expect_type("expected a processor", name, str, "a processor, its name, or ALL")
    if len(name) > NAME:
        raise InvalidOption(
            f"expected a processor's name of at most {NAME} characters for the ledger, got "
            f"{len(name)}; set a shorter name=…."
        )
    return name


def alias() -> str:
    """Return the database that has the ledger's tables: that to which the router writes them."""
    using: str = router.db_for_write(Control)
    return using


def controls() -> QuerySet[Control]:
    """Return the rows of all processors that have one."""
    return Control.objects.using(alias())


def records() -> QuerySet[Record]:
    """Return the records."""
    return Record.objects.using(alias())


@contextmanager
def waiting(seconds: float) -> Iterator[None]:
    """Open a transaction, whose statements wait so long for locks of other sessions.

    In a transaction of the caller, which keeps its own limit, a savepoint. SQLite has no
    transaction here, in which a read before a write would let the write fail, and waits as long as
    its option ``timeout`` says.
    """
    using = alias()
    connection = connections[using]
    if connection.in_atomic_block:
        with transaction.atomic(using=using):
            yield
    elif not connection.features.has_select_for_update:
        yield
    else:
        with transaction.atomic(using=using), time_limit(using, seconds):
            yield


def ensure(name: str, seconds: float = LOCK_WAIT) -> None:
    """Make the row of a processor, if there is none."""
    # Another worker, or an operator, may make it at the same time, and an older snapshot lack it.
    with suppress(IntegrityError), waiting(seconds):
        controls().get_or_create(processor=name)
