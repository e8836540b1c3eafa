"""The tables, and how their rows are reached.

No row of the user's work is in them: they may be emptied at any time. Times are by the database's
clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from django.db import models, router
from django.db.models import QuerySet

from dcl_processor.operator.times import utc
from dcl_processor.options.options import Definition
from dcl_processor.report.values import expect_type

#: Characters: of a processor's name, of who did it, of why a run ended, and of a text.
NAME, PERSON, REASON, TEXT = 255, 150, 100, 500


class Control(models.Model):
    """The pause of a processor, and how far its rate is used up.

    The row whose ``processor`` is empty is for all processors, and has a pause only.
    """

    processor = models.CharField(max_length=NAME, primary_key=True)
    paused_at = models.DateTimeField(null=True)
    paused_until = models.DateTimeField(null=True)
    paused_by = models.CharField(max_length=PERSON, default="")
    reason = models.CharField(max_length=TEXT, default="")
    #: By when all rows that its rate let start were due.
    free_at = models.DateTimeField(null=True)

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
