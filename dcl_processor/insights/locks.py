"""Which sessions have locked a row: read from PostgreSQL's own tables, without taking a lock.

A row keeps, in its system column ``xmax``, the transaction that locked or changed it last, and
``pg_locks`` has each transaction that is still open. A lock that several sessions share, or that a
savepoint took which was released since, is not found.
"""

from __future__ import annotations

from typing import Any

from django.db import connections
from django.db.models import TextField
from django.db.models.expressions import RawSQL

from dcl_processor.insights.answer import Answer
from dcl_processor.operator.times import utc_text
from dcl_processor.pending.question import Question, these
from dcl_processor.report.errors import shown

#: Characters of a statement that are shown.
LONGEST_QUERY = 200

# A session counts only if it has locked rows of the table, because the number of several sessions
# that share a lock may be that of another transaction. The rest of a session is hidden from roles
# without pg_read_all_stats.
_HOLDERS = """
SELECT activity.pid, application_name, usename, state, xact_start, query
FROM pg_locks AS held JOIN pg_stat_activity AS activity USING (pid)
WHERE held.transactionid = %s::xid AND held.mode = 'ExclusiveLock' AND EXISTS (
    SELECT FROM pg_locks AS locks WHERE locks.pid = held.pid AND locks.relation = %s::regclass
)
"""


def holders(question: Question[Any], pk: Any) -> Answer[tuple[str, ...]]:
    """Return the sessions that have locked a row now, each as people read it."""
    connection = connections[question.using]
    if connection.vendor != "postgresql":
        return Answer.not_recorded(f"{connection.display_name} does not show who locks a row")
    table = connection.ops.quote_name(question.model._meta.db_table)
    xmax = RawSQL(f"{table}.xmax::text", [], output_field=TextField())  # noqa: S611  # a constant
    marks = question.table.filter(these([pk])).order_by().values_list(xmax, flat=True)
    with connection.cursor() as cursor:
        cursor.execute(_HOLDERS, [marks.first(), table])
        return Answer(tuple(_named(*columns) for columns in cursor.fetchall()))


def _named(pid: int, name: str, role: str, *rest: Any) -> str:
    state, since, query = rest
    when = since and f"since {utc_text(since)}"
    words = [f"pid {pid}", name, f"role {role}", state, when, query[:LONGEST_QUERY]]
    return ", ".join(shown(each) for each in words if each)
