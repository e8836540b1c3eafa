"""The database's clock: the one clock that all copies share."""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime, timedelta
from typing import Any

from django.conf import settings
from django.db.models import DateTimeField, DurationField, Func, QuerySet, Value
from django.db.models.expressions import CombinedExpression
from django.db.models.functions import Now

# What Now() gives is not always what a DateTimeField keeps: MariaDB and MySQL keep UTC, and their
# Now() follows the session's time zone; SQLite keeps text, and its Now() is shorter by three digits
# than what Django writes, so that the two do not compare equal.


class DatabaseNow(Func):
    """The current time by the database's clock, as a field keeps it, with microseconds.

    That is UTC, or the zone that ``DATABASES`` says in ``TIME_ZONE`` the columns are in.
    With ``USE_TZ=False`` it is what ``Now()`` gives, since fields then keep local time.
    """

    template = "CURRENT_TIMESTAMP"
    output_field = DateTimeField()  # pyright: ignore[reportAssignmentType]  # as Django does

    def as_postgresql(self, compiler: Any, connection: Any, **context: Any) -> Any:
        # Not CURRENT_TIMESTAMP, which stands still during a transaction.
        return self.as_sql(compiler, connection, template="STATEMENT_TIMESTAMP()", **context)

    def as_mysql(self, compiler: Any, connection: Any, **context: Any) -> Any:
        template = "UTC_TIMESTAMP(6)" if settings.USE_TZ else "CURRENT_TIMESTAMP(6)"
        if offset := _offset(connection):
            template = f"({template} + INTERVAL {offset} SECOND)"
        return self.as_sql(compiler, connection, template=template, **context)

    def as_sqlite(self, compiler: Any, connection: Any, **context: Any) -> Any:
        zone = "" if settings.USE_TZ else ", 'localtime'"
        if offset := _offset(connection):
            zone = f", '{offset:+d} seconds'"
        now = f"STRFTIME('%%%%Y-%%%%m-%%%%d %%%%H:%%%%M:%%%%f000', 'NOW'{zone})"
        # Django writes a whole second without a fraction, and SQLite compares the two as texts.
        template = f"REPLACE({now}, '.000000', '')"
        return self.as_sql(compiler, connection, template=template, **context)

    def as_oracle(self, compiler: Any, connection: Any, **context: Any) -> Any:
        return Now().as_oracle(compiler, connection, **context)


class Later(CombinedExpression):
    """The database's clock and a delay after it, which tells two such times apart.

    A statement that was compiled for one delay can be executed for another.
    """

    def __init__(self, delay: timedelta) -> None:
        super().__init__(DatabaseNow(), self.ADD, Value(delay, DurationField()))
        self.delay = delay


def _offset(connection: Any) -> int:
    """Return the seconds from UTC to the zone that ``DATABASES`` says the columns are in.

    The server may not know that zone. This process's clock decides nothing but whether daylight
    saving time is on there.
    """
    zone = connection.timezone if settings.USE_TZ else UTC
    offset = datetime.now(UTC).astimezone(zone).utcoffset() or timedelta(0)
    return int(offset.total_seconds())


def read(table: QuerySet[Any], pks: Collection[Any]) -> datetime | None:
    """Read the database's clock, beside rows; ``None`` when none of them is there any more."""
    beside = table.filter(pk__in=list(pks)).annotate(_database_now=DatabaseNow())
    # A list, and not first(), which would sort.
    now: list[datetime] = list(beside.order_by().values_list("_database_now", flat=True)[:1])
    return now[0] if now else None
