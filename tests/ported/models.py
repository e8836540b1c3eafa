"""The tables that the loops work on."""

from __future__ import annotations

from django.db import models

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
