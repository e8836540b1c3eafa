"""Abstract models with the columns that ``Retry`` and ``Lease`` look for by default."""

from __future__ import annotations

from django.db import models


class RetryColumns(models.Model):
    """The columns of ``Retry()``: how often a row was tried, when it is due again, and why."""

    attempts = models.PositiveIntegerField(default=0, editable=False)
    next_attempt_at = models.DateTimeField(null=True, blank=True, editable=False)
    last_error = models.TextField(default="", blank=True, editable=False)

    class Meta:
        abstract = True


class LeaseColumn(models.Model):
    """The column of ``Lease(…)``: until when a row is held by whoever handles it."""

    leased_until = models.DateTimeField(null=True, blank=True, editable=False)

    class Meta:
        abstract = True
