"""The database's clock: the one clock that all copies share."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.db.models import DateTimeField, Func, QuerySet
from django.db.models.functions import Now

if TYPE_CHECKING:
    from .pending import Question

# What Now() gives is not always what a DateTimeField keeps: MariaDB and MySQL keep UTC, and their
# Now() follows the session's time zone; SQLite keeps text, and its Now() is shorter by three digits
# than what Django writes, so that the two do not compare equal.


class DatabaseNow(Func):
    """The current time by the database's clock, in UTC, with microseconds.

    With ``USE_TZ=False`` it is what ``Now()`` gives, since fields then keep local time.
    """

    template = "CURRENT_TIMESTAMP"
    output_field = DateTimeField()  # pyright: ignore[reportAssignmentType]  # as Django does

    def as_postgresql(self, compiler: Any, connection: Any, **context: Any) -> Any:
        # Not CURRENT_TIMESTAMP, which stands still during a transaction.
        return self.as_sql(compiler, connection, template="STATEMENT_TIMESTAMP()", **context)

    def as_mysql(self, compiler: Any, connection: Any, **context: Any) -> Any:
        template = "UTC_TIMESTAMP(6)" if settings.USE_TZ else "CURRENT_TIMESTAMP(6)"
        return self.as_sql(compiler, connection, template=template, **context)

    def as_sqlite(self, compiler: Any, connection: Any, **context: Any) -> Any:
        zone = "" if settings.USE_TZ else ", 'localtime'"
        now = f"STRFTIME('%%%%Y-%%%%m-%%%%d %%%%H:%%%%M:%%%%f000', 'NOW'{zone})"
        # Django writes a whole second without a fraction, and SQLite compares the two as texts.
        template = f"REPLACE({now}, '.000000', '')"
        return self.as_sql(compiler, connection, template=template, **context)

    def as_oracle(self, compiler: Any, connection: Any, **context: Any) -> Any:
        return Now().as_oracle(compiler, connection, **context)


def read(question: Question[Any], pks: Collection[Any]) -> datetime | None:
    """Read the database's clock, beside rows; ``None`` when none of them is there any more."""
    table: QuerySet[Any] = QuerySet(question.model, using=question.using)
    beside = table.filter(pk__in=list(pks)).annotate(_database_now=DatabaseNow())
    # A list, and not first(), which would sort.
    now: list[datetime] = list(beside.order_by().values_list("_database_now", flat=True)[:1])
    return now[0] if now else None
