"""Models on which the core of the contract is tried."""

from __future__ import annotations

from django.db import models

from dcl_processor.columns import LeaseColumn, RetryColumns


class Kind(RetryColumns, LeaseColumn):
    place = models.IntegerField(default=0)
    state = models.CharField(max_length=50, default="open")
    claimed_at = models.DateTimeField(null=True)

    class Meta:
        abstract = True

    def look(self) -> None:
        """Look at the row and save it, as a handler does that knows its model."""
        self.save()


class Plain(Kind):
    """What Django makes of most models."""


class OpenOnly(models.Manager["Hidden"]):
    def get_queryset(self) -> models.QuerySet[Hidden]:
        return super().get_queryset().filter(state__in=["open", "running"])


class Hidden(Kind):
    """Every manager hides it once it is done."""

    objects = OpenOnly()

    class Meta:
        base_manager_name = "objects"


class Computed(Kind):
    """Its question is about a generated column."""

    is_over = models.GeneratedField(
        expression=models.Q(state__in=["done", "dead"]),  # type: ignore[arg-type]  # it may be
        output_field=models.BooleanField(),
        db_persist=True,
    )
