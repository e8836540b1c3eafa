"""The model that the permissions belong to; it has no table and no rows."""

from __future__ import annotations

from django.db import models


class NoRows(models.Manager["Processor"]):
    """Finds no row, and asks no table: ``dumpdata`` asks every model."""

    def get_queryset(self) -> models.QuerySet[Processor]:
        """Return no row."""
        return super().get_queryset().none()


class Processor(models.Model):
    """A processor, as the admin and its log name it."""

    name = models.CharField(max_length=255, primary_key=True)

    objects = NoRows()

    class Meta:
        managed = False
        base_manager_name = "objects"
        default_permissions = ()
        permissions = [
            ("view_processors", "Can see the batch processors"),
            ("operate_processors", "Can operate the batch processors"),
        ]
        verbose_name = "processor"
        verbose_name_plural = "processors"

    def __str__(self) -> str:
        return self.name
