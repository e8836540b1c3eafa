"""Which sessions hold locks on rows: read from PostgreSQL's own tables, without taking a lock.

A row keeps, in its system column ``xmax``, the transaction that locked or changed it last, or a
*multixact*: a number for several such transactions. ``pg_locks`` has each transaction that is still
open. The lock that a released savepoint took has a transaction of its own, which is open, but
``pg_locks`` no longer names its session.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from django.db import connections
from django.db.models import Func, Model, QuerySet, TextField

from dcl_processor.pending.question import Question
from dcl_processor.report.errors import printable

from . import catalog
from .answer import Answer

#: Characters of a statement that are shown.
LONGEST_QUERY = 200

#: What a role without this right sees of another role's session.
_HIDDEN = "<insufficient privilege>"

#: The row lock of a foreign key's check, which keeps no worker from a row.
KEY_SHARE = "keysh"

# Each number is looked up as a transaction and as a multixact, because a row does not show which of
# the two it keeps; only numbers that are multixacts can be looked up as such without an error. A
# session counts only if it has locked rows of the table, in case the number is both. The state of
# a transaction is looked up by a number of 64 bits, the one that is nearest to the latest.
_HOLDERS = """
WITH marks AS (
    SELECT number, number::text::xid AS mark FROM unnest(%(numbers)s::bigint[]) AS number
), horizon AS (
    SELECT oid AS database, mxid_age(datminmxid) AS oldest,
        pg_snapshot_xmax(pg_current_snapshot())::text::bigint AS near
    FROM pg_database WHERE datname = current_database()
), locks AS MATERIALIZED (
    SELECT locktype, database, relation, transactionid, virtualtransaction, pid, mode
    FROM pg_locks WHERE granted AND locktype IN ('transactionid', 'relation')
), sessions AS (
    SELECT DISTINCT virtualtransaction FROM locks, horizon
    WHERE locktype = 'relation' AND relation = %(table)s::regclass
        AND locks.database = horizon.database AND mode IN ('RowShareLock', 'RowExclusiveLock')
), members AS (
    SELECT number, mark AS xid, NULL AS mode FROM marks
    UNION ALL
    SELECT number, member.xid, member.mode FROM marks, horizon, LATERAL pg_get_multixact_members(
        CASE WHEN mxid_age(mark) BETWEEN 1 AND oldest THEN mark END
    ) AS member
), held AS (
    SELECT members.number, members.xid, members.mode, locks.pid
    FROM members
    JOIN locks ON locks.locktype = 'transactionid' AND locks.transactionid = members.xid
        AND locks.mode = 'ExclusiveLock'
    JOIN sessions USING (virtualtransaction)
), unnamed AS (
    SELECT number, age(mark) AS age,
        near - 2147483648 + ((number - near + 2147483648) & 4294967295) AS wide
    FROM marks, horizon
    WHERE number NOT IN (SELECT number FROM held) AND EXISTS (SELECT FROM sessions)
)
SELECT held.number, held.mode, held.pid, prepared.gid, activity.application_name,
    activity.usename, host(activity.client_addr), activity.client_port, activity.xact_start,
    activity.state, activity.query
FROM held
LEFT JOIN pg_stat_activity AS activity ON activity.pid = held.pid
LEFT JOIN pg_prepared_xacts AS prepared ON prepared.transaction = held.xid
UNION ALL
SELECT number, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL
FROM unnamed
WHERE CASE WHEN wide >= 3 AND age > 0
    THEN pg_xact_status(wide::text::xid8) = 'in progress' END
"""


@dataclass(frozen=True, slots=True)
class Holder:
    """A session that holds locks on rows; ``rows``: on how many of those that were asked about.

    ``pid``: ``None`` for a transaction that is prepared, with its name in ``prepared``, or whose
    session is not shown. ``mode``: the lock, as ``pg_get_multixact_members()`` names it, if several
    transactions have locked the row. ``since``: the start of its transaction. ``hidden``: what this
    role is not allowed to see; the role ``pg_read_all_stats`` is.
    """

    pid: int | None
    rows: int = 1
    mode: str | None = None
    prepared: str | None = None
    application_name: str = ""
    role: str | None = None
    client: str | None = None
    since: datetime | None = None
    state: str | None = None
    query: str | None = None
    hidden: tuple[str, ...] = ()

    @property
    def blocks(self) -> bool:
        """Whether the lock keeps workers from the row, as far as its mode is known.

        PostgreSQL shows no mode of a row's only lock: it may be that of a foreign key's check,
        which keeps no worker from the row.
        """
        return self.mode != KEY_SHARE


@dataclass(frozen=True, slots=True)
class Locked:
    """How many of the rows are locked, and the sessions that hold the locks."""

    rows: int
    holders: tuple[Holder, ...]


class _Xmax(Func):
    """The number of the transaction, or of the multixact, that locked a row of the table last."""

    arity = 0

    def __init__(self, table: str) -> None:
        column = f'{table}."xmax"::text'.replace("%", "%%")
        super().__init__(template=column, output_field=TextField())


def locked(question: Question[Any], among: QuerySet[Any, Any] | Collection[Any]) -> Answer[Locked]:
    """Return how many of these rows are locked now, and by which sessions.

    The rows are given by their keys, or by a queryset of them.
    """
    using = question.using
    if why := unseen(using):
        return Answer.not_recorded(why)
    return Answer(_of_table(question.model, using, among))


def _of_table(
    model: type[Model], using: str, among: QuerySet[Any, Any] | Collection[Any]
) -> Locked:
    table = connections[using].ops.quote_name(model._meta.db_table)
    rows = QuerySet[Any](model, using=using).filter(pk__in=among).order_by()
    marks = rows.annotate(dcl_xmax=_Xmax(table)).exclude(dcl_xmax="0")
    numbers = Counter(map(int, marks.values_list("dcl_xmax", flat=True)))
    found = _holders(using, _HOLDERS, numbers=list(numbers), table=table) if numbers else []
    blocked = {number for number, holder in found if holder.blocks}
    return Locked(sum(numbers[each] for each in blocked), _merged(found, numbers))


def unseen(using: str) -> str:
    """Return why this database does not show the holders of its row locks; empty: it shows them."""
    connection: Any = connections[using]
    match connection.vendor:
        case "postgresql":
            return ""
        case "sqlite":
            return "SQLite locks the whole database, and does not show for which process"
        case "mysql" if connection.mysql_is_mariadb:
            return "MariaDB shows only sessions that wait for a row lock, not those that hold one"
        case "mysql":
            return "on MySQL, look into performance_schema.data_locks"
        case _:
            return f"{connection.display_name} is not asked for its locks"


def _holders(using: str, sql: str, **parameters: Any) -> list[tuple[int, Holder]]:
    found = catalog.rows(using, sql, parameters)
    return [(number, _holder(columns)) for number, *columns in found]


def _holder(columns: Sequence[Any]) -> Holder:
    mode, pid, prepared, application_name, role, client, port, since, state, query = columns
    is_hidden = query == _HIDDEN
    address = client if port is None or port < 0 else f"{client}:{port}"
    return Holder(
        pid=pid or None,
        mode=mode,
        prepared=prepared,
        application_name=printable(application_name or ""),
        role=None if role is None else printable(role),
        client=address or (None if is_hidden or pid is None else "local socket"),
        since=since,
        state=state,
        query=None if is_hidden or query is None else printable(query)[:LONGEST_QUERY],
        hidden=("client", "since", "state", "query") if is_hidden else (),
    )


def _merged(found: Iterable[tuple[int, Holder]], rows: Counter[int]) -> tuple[Holder, ...]:
    """Return each session once, with the number of its rows; those with most rows first."""
    merged: dict[Any, Holder] = {}
    for number, holder in found:
        key = holder.pid, holder.prepared, holder.mode
        before = merged[key].rows if key in merged else 0
        merged[key] = replace(holder, rows=before + rows[number])
    return tuple(sorted(merged.values(), key=lambda each: -each.rows))
