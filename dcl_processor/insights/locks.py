"""Which sessions hold locks on a row: read from PostgreSQL's own tables, without taking a lock.

A row keeps, in its system column ``xmax``, the transaction that locked or changed it last, or a
*multixact*: a number for several such transactions. ``pg_locks`` has each transaction that is still
open. The lock that a released savepoint took has a transaction of its own, which is open, but
``pg_locks`` no longer names its session.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from django.db import connections
from django.db.models import Func, TextField

from dcl_processor.insights.answer import Answer, document_of
from dcl_processor.operator.times import utc_text
from dcl_processor.pending.question import Question, these
from dcl_processor.report.errors import shown

#: Characters of a statement that are shown.
LONGEST_QUERY = 200

#: What a role without this right sees of another role's session.
_HIDDEN = "<insufficient privilege>"

# The number is looked up as a transaction and as a multixact, because a row does not show which of
# the two it keeps; only a number that is a multixact can be looked up as such without an error. A
# session counts only if it has locked rows of the table, in case the number is both, and if its
# lock is not that of a foreign key's check. The state of a transaction is looked up by a number of
# 64 bits, the one that is nearest to the latest.
_HOLDERS = """
WITH mark AS (
    SELECT number, number::text::xid AS xid, mxid_age(datminmxid) AS oldest, oid AS database,
        pg_snapshot_xmax(pg_current_snapshot())::text::bigint AS near
    FROM (SELECT %(number)s::bigint AS number) AS _mark, pg_database
    WHERE datname = current_database()
), locks AS MATERIALIZED (
    SELECT * FROM pg_locks WHERE granted AND locktype IN ('transactionid', 'relation')
), sessions AS (
    SELECT DISTINCT virtualtransaction FROM locks JOIN mark USING (database)
    WHERE locktype = 'relation' AND relation = %(table)s::regclass
        AND mode IN ('RowShareLock', 'RowExclusiveLock')
), members AS (
    SELECT xid FROM mark UNION ALL
    SELECT member.xid FROM mark, LATERAL pg_get_multixact_members(
        CASE WHEN mxid_age(mark.xid) BETWEEN 1 AND oldest THEN mark.xid END
    ) AS member WHERE member.mode <> 'keysh'
), held AS (
    SELECT members.xid, locks.pid FROM members JOIN locks ON locktype = 'transactionid'
        AND transactionid = members.xid AND mode = 'ExclusiveLock'
    JOIN sessions USING (virtualtransaction)
)
SELECT held.pid, gid, application_name, usename,
    coalesce(host(client_addr) || ':' || client_port, 'local socket'), xact_start, state, query
FROM held LEFT JOIN pg_stat_activity AS activity ON activity.pid = held.pid
LEFT JOIN pg_prepared_xacts AS prepared ON prepared.transaction = held.xid
UNION ALL
SELECT NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL FROM (
    SELECT near - 2147483648 + ((number - near + 2147483648) & 4294967295) AS wide FROM mark
    WHERE age(xid) > 0 AND NOT EXISTS (SELECT FROM held) AND EXISTS (SELECT FROM sessions)
) AS unnamed
WHERE CASE WHEN wide >= 3 THEN pg_xact_status(wide::text::xid8) = 'in progress' END
"""


@dataclass(frozen=True, slots=True)
class Holder:
    """A session that holds a lock on a row.

    ``pid``: ``None`` for a transaction that is prepared, with its name in ``prepared``, or whose
    session is not shown. ``since``: the start of its transaction.
    """

    pid: int | None
    prepared: str | None = None
    application_name: str | None = None
    role: str | None = None
    client: str | None = None
    since: datetime | None = None
    state: str | None = None
    query: str | None = None

    def __str__(self) -> str:
        if self.prepared is not None:
            return f"the prepared transaction {shown(self.prepared)!r}"
        if not self.pid:
            return "a session that PostgreSQL does not name"
        role, since = self.role and f"role {self.role}", self.since
        known = [self.application_name, role, self.client]
        known += [since and f"since {utc_text(since)}", self.state, self.query]
        words = ", ".join([f"pid {self.pid}", *(shown(each) for each in known if each)])
        hidden = " (the rest is hidden from this role; GRANT pg_read_all_stats TO it)"
        return words if self.query is not None else words + hidden

    def as_dict(self) -> dict[str, Any]:
        """Return the session for JSON."""
        return {name: document_of(value) for name, value in asdict(self).items()}


class _Xmax(Func):
    """The number of the transaction, or of the multixact, that locked a row of the table last."""

    arity = 0

    def __init__(self, table: str) -> None:
        column = f'{table}."xmax"::text'.replace("%", "%%")
        super().__init__(template=column, output_field=TextField())


def holders(question: Question[Any], pk: Any) -> Answer[tuple[Holder, ...]]:
    """Return the sessions that have locked a row now."""
    connection = connections[question.using]
    if connection.vendor != "postgresql":
        return Answer.not_recorded(f"{connection.display_name} does not show who locks a row")
    table = connection.ops.quote_name(question.model._meta.db_table)
    marks = question.table.filter(these([pk])).order_by().annotate(dcl_xmax=_Xmax(table))
    numbers = [number for number in marks.values_list("dcl_xmax", flat=True) if number != "0"]
    with connection.cursor() as cursor:
        for number in numbers:
            cursor.execute(_HOLDERS, {"number": int(number), "table": table})
            return Answer(tuple(_holder(*columns) for columns in cursor.fetchall()))
    return Answer(())


def _holder(pid: Any, prepared: Any, name: Any, role: Any, client: Any, *rest: Any) -> Holder:
    since, state, query = rest
    if pid is None or query == _HIDDEN:
        return Holder(pid, prepared, name, role)
    return Holder(pid, prepared, name, role, client, since, state, query[:LONGEST_QUERY])
