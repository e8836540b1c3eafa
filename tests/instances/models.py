"""Tables whose rows become instances in ways of their own."""

from __future__ import annotations

from typing import Any

from django.contrib.contenttypes.models import ContentType
from django.db import models
from polymorphic.models import PolymorphicModel

from dcl_processor.columns import LeaseColumn, RetryColumns


class Job(PolymorphicModel):
    """The base class of a family whose querysets give instances of the children."""

    # Without a constraint, as an app without migrations cannot have one on a table of migrations.
    polymorphic_ctype = models.ForeignKey(
        ContentType,
        models.CASCADE,
        null=True,
        editable=False,
        related_name="+",
        db_constraint=False,
    )
    done = models.BooleanField(default=False)
    claimed = models.BooleanField(default=False)
    claimed_at = models.DateTimeField(null=True)
    leased_until = models.DateTimeField(null=True)
    attempts = models.PositiveIntegerField(default=0)
    next_attempt_at = models.DateTimeField(null=True)
    last_error = models.TextField(default="")


class PrintJob(Job):
    pages = models.IntegerField(default=1)


class MailJob(Job):
    address = models.CharField(max_length=50, default="")


class CipherField(models.CharField):  # type: ignore[type-arg]  # no generic at run time
    """Kept and read by SQL functions, as fields of encryption packages are."""

    def get_placeholder(self, value: Any, compiler: Any, connection: Any) -> str:
        return "UPPER(%s)"

    def get_placeholder_sql(self, value: Any, compiler: Any, connection: Any) -> tuple[str, Any]:
        # Django 6.1's name for it, which it warns about when it is missing.
        return "UPPER(%s)", (value,)

    def select_format(self, compiler: Any, sql: str, params: Any) -> tuple[str, Any]:
        return f"LOWER({sql})", params


class ReadLate(models.QuerySet["Secret"]):
    """Completes its instances after they were loaded."""

    def _fetch_all(self) -> None:
        super()._fetch_all()
        for row in self._result_cache or ():
            if isinstance(row, Secret):
                row.completed = True


class Secret(RetryColumns, LeaseColumn):
    word = CipherField(max_length=50, default="")
    done = models.BooleanField(default=False)
    claimed = models.BooleanField(default=False)
    claimed_at = models.DateTimeField(null=True)
    completed = False

    objects = ReadLate.as_manager()
