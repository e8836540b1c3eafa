"""The tables that the loops work on."""

from __future__ import annotations

from django.db import models
from django.utils import timezone

from dcl_processor.columns import LeaseColumn, RetryColumns


class Account(models.Model):
    balance = models.IntegerField(default=0)
    closed = models.BooleanField(default=False)


class Item(RetryColumns, LeaseColumn):
    """A row with everything that some loop writes."""

    name = models.CharField(max_length=20)
    state = models.CharField(max_length=10, default="new")
    kind = models.CharField(max_length=10, default="")
    owner = models.ForeignKey(Account, models.CASCADE, related_name="items")
    parent = models.ForeignKey("self", models.CASCADE, null=True, related_name="children")
    amount = models.IntegerField(default=0)
    priority = models.IntegerField(default=0)
    allowed = models.IntegerField(null=True)
    result = models.CharField(max_length=50, default="")
    worker = models.CharField(max_length=80, default="")
    due_at = models.DateTimeField(null=True)
    started_at = models.DateTimeField(null=True)
    finished_at = models.DateTimeField(null=True)

    class Meta:
        indexes = [
            models.Index(fields=["kind", "id"], name="ported_item_kind"),
            models.Index(fields=["kind", "leased_until"], name="ported_item_in_flight"),
        ]

    @property
    def parts_made(self) -> str:
        return ",".join(self.parts.order_by("pk").values_list("text", flat=True))

    @property
    def balance(self) -> int:
        return self.owner.balance

    @property
    def is_finished(self) -> bool:
        return self.finished_at is not None

    @property
    def is_due(self) -> bool:
        return self.due_at is None or self.due_at <= timezone.now()

    def finish(self) -> None:
        """Change the state, and keep a history, as methods of models do."""
        self.state = "done"
        self.save(update_fields=["state"])
        self.parts.create(text="history")


class Part(models.Model):
    """A row that the work on an item makes; without an item, what is left of one."""

    item = models.ForeignKey(Item, models.CASCADE, null=True, related_name="parts")
    text = models.CharField(max_length=50)
