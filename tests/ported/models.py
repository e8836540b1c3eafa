"""The tables that the loops work on."""

from __future__ import annotations

from django.db import models
from django.utils import timezone

from dcl_processor.columns import LeaseColumn, RetryColumns


class Member(models.Model):
    name = models.CharField(max_length=50)


class Notification(models.Model):
    """Waits to be shown to its member, together with the others of that member."""

    member = models.ForeignKey(Member, models.CASCADE, related_name="notifications")
    text = models.CharField(max_length=200)
    broadcast = models.BooleanField(default=False)


class Account(models.Model):
    balance = models.IntegerField(default=0)
    closed = models.BooleanField(default=False)


class Change(RetryColumns):
    """A change of an account, as another system has sent it: "new", "done" or "rejected"."""

    account = models.ForeignKey(Account, models.CASCADE, related_name="changes")
    amount = models.IntegerField()
    state = models.CharField(max_length=10, default="new")


class Task(RetryColumns, LeaseColumn):
    """Is "queued", "done" or "failed"; the highest priority comes first."""

    payload = models.CharField(max_length=50)
    priority = models.IntegerField(default=0)
    state = models.CharField(max_length=10, default="queued")


class Price(RetryColumns, LeaseColumn):
    """A price that a shop is to show: "new", "shown" or "refused"."""

    sku = models.CharField(max_length=20)
    amount = models.IntegerField()
    state = models.CharField(max_length=10, default="new")


class Job(RetryColumns, LeaseColumn):
    """Is "new", "running", "done" or "failed"; few of one kind may run at a time."""

    kind = models.CharField(max_length=20)
    payload = models.CharField(max_length=50)
    state = models.CharField(max_length=10, default="new")
    worker = models.CharField(max_length=50, default="")


class ChatUpdate(RetryColumns, LeaseColumn):
    """What arrived in a chat: "new", "running", "done" or "failed"; a chat keeps its order."""

    chat = models.IntegerField()
    number = models.IntegerField()
    text = models.CharField(max_length=50)
    state = models.CharField(max_length=10, default="new")


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
