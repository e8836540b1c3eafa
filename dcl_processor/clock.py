"""The database's clock: the one clock that all workers share."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any, TypeVar
from zoneinfo import ZoneInfo

from django.conf import settings
from django.db import connections
from django.db.models import DateTimeField, DurationField, Func, QuerySet, Value
from django.db.models.expressions import CombinedExpression
from django.utils import timezone

# Now() does not always return the value that a DateTimeField keeps. MariaDB and MySQL keep what
# Django writes, in UTC or with USE_TZ=False in TIME_ZONE's local time, but their Now() follows the
# session's time zone. SQLite keeps text, and its Now() is three digits shorter than what Django
# writes, so that the two do not compare equal.


class DatabaseNow(Func):
    """The current time by the database's clock, as a field keeps it, with microseconds.

    The time is in UTC, or in the columns' zone, which ``TIME_ZONE`` in ``DATABASES`` sets.
    With ``USE_TZ=False`` it is the local time of the settings' ``TIME_ZONE``.
    """

    template = "CURRENT_TIMESTAMP"
    output_field = DateTimeField()  # pyright: ignore[reportAssignmentType]  # as Django does

    def as_postgresql(self, compiler: Any, connection: Any, **context: Any) -> Any:
        # Not CURRENT_TIMESTAMP, which stands still during a transaction.
        return self.as_sql(compiler, connection, template="STATEMENT_TIMESTAMP()", **context)

    def as_mysql(self, compiler: Any, connection: Any, **context: Any) -> Any:
        template = "UTC_TIMESTAMP(6)"
        if offset := _offset(connection):
            template = f"({template} + INTERVAL {offset} SECOND)"
        return self.as_sql(compiler, connection, template=template, **context)

    def as_sqlite(self, compiler: Any, connection: Any, **context: Any) -> Any:
        zone = "" if settings.USE_TZ else ", 'localtime'"
        if settings.USE_TZ and (offset := _offset(connection)):
            zone = f", '{offset:+d} seconds'"
        now = f"STRFTIME('%%%%Y-%%%%m-%%%%d %%%%H:%%%%M:%%%%f000', 'NOW'{zone})"
        # Django writes a whole second without a fraction, and SQLite compares times as text.
        template = f"REPLACE({now}, '.000000', '')"
        return self.as_sql(compiler, connection, template=template, **context)


Time = TypeVar("Time", bound=datetime | None)


def utc(at: Time) -> Time:
    """Return a column's time in UTC; without a zone it is local time of ``TIME_ZONE``."""
    if at is None:
        return at
    zone = timezone.get_default_timezone()
    aware: Any = timezone.make_aware(at, zone) if at.tzinfo is None else at
    return aware.astimezone(UTC)  # type: ignore[no-any-return]  # a datetime


def utc_text(at: datetime) -> str:
    """Write a column's time for people."""
    return f"{utc(at):%Y-%m-%d %H:%M:%S} UTC"


class Later(CombinedExpression):
    """The database's clock plus a delay; two such times differ only in their delay.

    A statement that was compiled for one delay can be executed for another.
    """

    def __init__(self, delay: timedelta) -> None:
        super().__init__(DatabaseNow(), self.ADD, Value(delay, DurationField()))
        self.delay = delay


def _offset(connection: Any) -> int:
    """Return the seconds from UTC to the zone that columns without a zone are in.

    The server may not know that zone. This process's clock decides only whether the zone has
    daylight saving time now.
    """
    offset = datetime.now(UTC).astimezone(_zone(connection)).utcoffset()
    return int((offset or timedelta(0)).total_seconds())


def _zone(connection: Any) -> tzinfo | None:
    """Return the zone that columns without a zone are in; ``None``: this process's zone."""
    if settings.USE_TZ:
        zone: tzinfo = connection.timezone
        return zone
    return ZoneInfo(settings.TIME_ZONE) if settings.TIME_ZONE else None


def read(table: QuerySet[Any], pks: Collection[Any]) -> datetime | None:
    """Return the database's clock, read with these rows, or ``None`` if none of them exists.

    If columns have a time zone, it is an instant, to which a delay can be added.
    """
    beside = table.filter(pk__in=list(pks)).annotate(_database_now=DatabaseNow())
    # A list, and not first(), which would sort.
    now: list[datetime] = list(beside.order_by().values_list("_database_now", flat=True)[:1])
    return recognisable(now[0], table.db) if now else None


def recognisable(value: Any, using: str) -> Any:
    """Return the value to compare with, to find a row by this value again; mostly unchanged.

    With ``USE_TZ=False`` Django converts the value of a column with a time zone to local time. Sent
    back unchanged, a time in the hour that occurs twice would match the other of the two hours.
    """
    if settings.USE_TZ or not isinstance(value, datetime) or value.tzinfo is not None:
        return value
    connection: Any = connections[using]
    if not connection.features.supports_timezones:
        return value
    # The driver made the local time in this zone; its fold shows which of the two hours it is.
    return value.replace(tzinfo=connection.connection.info.timezone).astimezone(UTC)


def recognisable_columns(
    rows: Mapping[Any, Mapping[str, Any]], using: str
) -> Mapping[Any, Mapping[str, Any]]:
    """Return the rows' columns with ``recognisable()`` values."""
    if settings.USE_TZ:
        return rows
    return {
        pk: {name: recognisable(value, using) for name, value in columns.items()}
        for pk, columns in rows.items()
    }
