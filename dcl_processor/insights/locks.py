"""Which sessions hold locks on a row: read from PostgreSQL's own tables, without taking a lock.

A row keeps, in its system column ``xmax``, the transaction that locked or changed it last, or a
*multixact*: a number for several such transactions. ``pg_locks`` has each transaction that is still
open. The lock that a released savepoint took has a transaction of its own, which is open, but
``pg_locks`` no longer names its session.
"""

from __future__ import annotations

from typing import Any

from django.db import connections
from django.db.models import Func, TextField

from dcl_processor.insights import catalog
from dcl_processor.insights.answer import Answer
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


class _Xmax(Func):
    """The number of the transaction, or of the multixact, that locked a row of the table last."""

    arity = 0

    def __init__(self, table: str) -> None:
        column = f'{table}."xmax"::text'.replace("%", "%%")
        super().__init__(template=column, output_field=TextField())


def holders(question: Question[Any], pk: Any) -> Answer[tuple[str, ...]]:
    """Return the sessions that have locked a row now, each as people read it."""
    connection = connections[question.using]
    if connection.vendor != "postgresql":
        return Answer.not_recorded(f"{connection.display_name} does not show who locks a row")
    table = connection.ops.quote_name(question.model._meta.db_table)
    marks = question.table.filter(these([pk])).order_by().annotate(dcl_xmax=_Xmax(table))
    for number in marks.exclude(dcl_xmax="0").values_list("dcl_xmax", flat=True):
        parameters = {"number": int(number), "table": table}
        found = catalog.rows(question.using, _HOLDERS, parameters)
        return Answer(tuple(_named(*columns) for columns in found))
    return Answer(())


def _named(pid: Any, prepared: Any, name: Any, role: Any, client: Any, *rest: Any) -> str:
    since, state, query = rest
    if prepared is not None:
        return f"the prepared transaction {shown(prepared)!r}"
    if not pid:
        return "a session that PostgreSQL does not name"
    words, hidden = [f"pid {pid}", name, f"role {role}"], ""
    if query == _HIDDEN:
        hidden = " (the rest is hidden from this role; GRANT pg_read_all_stats to it)"
    else:
        words += [client, since and f"since {utc_text(since)}", state, query[:LONGEST_QUERY]]
    return ", ".join(shown(each) for each in words if each) + hidden
