"""The rows of a processor: those in a state, those of an error, and what is known of one row."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from django.db import connections
from django.db.models import (
    DateTimeField,
    Exists,
    F,
    IntegerField,
    Model,
    OuterRef,
    Q,
    QuerySet,
    TextField,
)
from django.db.models.expressions import RawSQL
from django.db.models.functions import Cast, Substr

from dcl_processor.insights.answer import TIMEOUT, Answer, Asker, Moment, document_of
from dcl_processor.keys.columns import column_of
from dcl_processor.operator.states import (
    STATES,
    NotRecordedError,
    in_state,
    is_timeless,
    question_of,
)
from dcl_processor.operator.times import utc_text
from dcl_processor.options.model_columns import own_columns
from dcl_processor.options.options import Definition
from dcl_processor.pending.clock import DatabaseNow
from dcl_processor.pending.question import Question, these
from dcl_processor.report.errors import masked, printable, shown

__all__ = ["STATES", "NotRecordedError", "in_state", "question_of"]

#: What a table of rows has.
COLUMNS = ("key", "since", "attempts", "error")

#: Characters of an error that are read, of the name of its class, and of a statement.
LONGEST_TEXT, LONGEST_KIND, LONGEST_QUERY = 300, 100, 200

#: Why a row is handled, or not, by the first of these states that it is in.
REASONS = {
    "in_progress": "a worker has claimed it, and may be at work",
    "in_doubt": "it is in doubt: its claim was never settled; requeue it, or mark it as done",
    "given_up": "it was given up on{error}",
    "held": "it waits for its key: another row of it is at work, in doubt, or comes first",
    "later": "its next attempt is at {time}",
    "due": "the next run takes it, unless another session has locked it",
    "pending": "it is pending, and no run tries it now",
}


def chosen(
    processor: Definition[Any],
    question: Question[Any],
    *,
    keys: Collection[Any] | None,
    in_doubt: float | None,
    kind: str | None,
) -> QuerySet[Any, Any]:
    """Return the rows that an operator wants to act on: those with these keys, if there are any.

    Or else those that are in doubt for ``in_doubt`` seconds; without both, those that were given up
    on. ``kind``: only those whose last error is of this class.
    """
    if keys is not None:
        return question.table.filter(pk__in=keys)
    state = "given_up" if in_doubt is None else "in_doubt"
    return of_kind(processor, in_state(state, processor, question, in_doubt), kind)


# --- the rows of a state, in pages


@dataclass(frozen=True, slots=True)
class Listed:
    """A row. ``since``: when it was claimed, is tried again, or has begun to wait."""

    pk: Any
    since: Moment | None
    attempts: int | None
    error: str

    @property
    def key(self) -> str:
        """The key of the row as an operator types it."""
        return key_text(self.pk)

    def as_dict(self) -> dict[str, Any]:
        """Return the row for JSON, and for a line of a table."""
        since, seconds = (None, None) if self.since is None else (self.since, self.since.seconds)
        known = {"key": self.key, "since": document_of(since), "seconds": seconds}
        return {**known, "attempts": self.attempts, "error": self.error}


@dataclass(frozen=True, slots=True)
class Page:
    """Rows by their primary keys; ``after``: where the next page begins; ``None``: nowhere."""

    rows: tuple[Listed, ...]
    after: Any = None


def listed(
    processor: Definition[Any],
    state: str,
    *,
    using: str | None = None,
    seconds: float = TIMEOUT,
    doubt_after: float | None = None,
    after: Any = None,
    size: int = 500,
) -> Answer[Page]:
    """Return a page of the rows in one of ``STATES``; raises no error.

    ``after``: that of the page before.
    """

    def page(question: Question[Any]) -> Answer[Page]:
        found = in_state(state, processor, question, doubt_after).order_by("pk")
        found = found if after is None else found.filter(pk__gt=after)
        read = list(_shown(processor, state, found)[:size])
        # A filter over a to-many relation gives a row once per match.
        rows = {
            pk: Listed(pk, Moment.of(at, now), attempts, shown(error or "", LONGEST_TEXT))
            for pk, at, now, attempts, error in read
        }
        return Answer(Page(tuple(rows.values()), read[-1][0] if len(read) == size else None))

    return Asker(processor, using, seconds).ask(page)


def _shown(processor: Definition[Any], state: str, found: QuerySet[Any, Any]) -> QuerySet[Any, Any]:
    retry: Any = processor.retry
    times = {"in_progress": processor.claimed_at, "in_doubt": processor.claimed_at}
    times["later"] = retry and retry.next_attempt_at
    since: Any = times.get(state, processor.pending_since)
    error: Any = retry and retry.last_error
    shows: QuerySet[Any, Any] = found.annotate(
        dcl_since=Cast(F(since) if isinstance(since, str) else since, DateTimeField()),
        dcl_now=DatabaseNow(),
        dcl_attempts=Cast(retry and F(retry.attempts), IntegerField()),
        dcl_error=Cast(error and Substr(error, 1, LONGEST_TEXT), TextField()),
    ).values_list("pk", "dcl_since", "dcl_now", "dcl_attempts", "dcl_error")
    return shows


# --- rows by the class of their error


def kind_of(text: str) -> str:
    """Return the class of an error as ``Retry`` writes it, or the text's beginning, masked."""
    return printable(masked(text).partition(":")[0])[:LONGEST_KIND]


def of_kind(
    processor: Definition[Any], found: QuerySet[Any, Any], kind: str | None
) -> QuerySet[Any, Any]:
    """Return those of the rows whose last error is of this class; ``None``: of any, "": without."""
    if kind is None:
        return found
    column = processor.retry.last_error if processor.retry else None
    if column is None:
        raise NotRecordedError("set retry=Retry(…) with last_error, which stores the last error")
    empty, begins = Q(**{f"{column}__isnull": True}), Q(**{f"{column}__startswith": f"{kind}:"})
    return found.filter(Q(**{column: kind}) | (begins if kind else empty))


# --- one row


@dataclass(frozen=True, slots=True)
class Row:
    """What is known of one row.

    ``reason``: why the next run takes it, or not. ``parts``: whether it is in each of ``STATES``;
    those that no column shows are left out. ``columns``: those of its retry, its lease, its claim
    and its key, and that of ``pending_since``. ``locked``: the sessions that have locked it.
    """

    name: str
    pk: Any
    using: str
    reason: str
    parts: Mapping[str, bool]
    columns: Mapping[str, Any]
    locked: Answer[tuple[str, ...]]

    def as_dict(self) -> dict[str, Any]:
        """Return the row for JSON."""
        return {
            "name": self.name,
            "pk": key_text(self.pk),
            "database": self.using,
            "reason": self.reason,
            "parts": dict(self.parts),
            "columns": {name: document_of(value) for name, value in self.columns.items()},
            "locked": self.locked.as_dict(),
        }


def show(
    processor: Definition[Any], pk: Any, *, using: str | None = None, seconds: float = TIMEOUT
) -> Answer[Row]:
    """Return what is known of the row with this primary key; an exact ``None``: there is none."""
    asker = Asker(processor, using, seconds)
    found = asker.ask(lambda question: Answer(_read(processor, question, pk)))
    if found.value is None:
        return Answer(None, found.how, found.why)
    parts, columns = found.value
    reason = _reason(processor, parts, columns)
    locked = asker.ask(lambda question: holders(question, pk))
    return Answer(Row(processor.name, pk, str(asker.using), reason, parts, columns, locked))


def _read(
    processor: Definition[Any], question: Question[Any], pk: Any
) -> tuple[dict[str, bool], dict[str, Any]] | None:
    """Return the row's states, and its columns, by one statement."""
    since, names, asked = processor.pending_since, own_columns(processor), dict[str, Any]()
    if isinstance(since, str):
        names.append(since)
    if processor.group_by is not None:
        names.append(column_of(processor, "group_by", question.model))
    for state in STATES:
        try:
            rows = in_state(state, processor, question).order_by()
        except NotRecordedError:
            continue
        asked[f"dcl_{state}"] = Exists(rows.filter(pk=OuterRef("pk")))
    found = question.table.filter(these([pk])).order_by().annotate(**asked)
    for columns in found.values(*dict.fromkeys(names), *asked)[:1]:
        parts = {name.removeprefix("dcl_"): columns.pop(name) for name in asked}
        error = processor.retry.last_error if processor.retry else None
        if error is not None:
            columns[error] = masked(columns[error] or "")
        return parts, columns
    return None


def _reason(processor: Definition[Any], parts: Mapping[str, bool], columns: Any) -> str:
    is_in = [name for name in REASONS if parts.get(name)]
    if not is_in:
        claimed = "claimed, " if processor.claim is not None and is_timeless(processor) else ""
        return f"it is not in pending: it is {claimed}done, or does not wait yet"
    retry: Any = processor.retry
    at, error = (
        retry and columns.get(retry.next_attempt_at),
        retry and columns.get(retry.last_error),
    )
    said = f": {shown(error, LONGEST_TEXT)}" if error else ""
    return REASONS[is_in[0]].format(time=at and utc_text(at), error=said)


# --- the sessions that have locked a row, as PostgreSQL's own tables show them, without a lock

# A row keeps, in its system column xmax, the transaction that locked or changed it last, and
# pg_locks has each transaction that is still open. A lock that several sessions share, or that a
# savepoint took which was released since, is not found. A session counts only if it has locked rows
# of the table, because the number of several sessions that share a lock may be that of another
# transaction. The rest of a session is hidden from roles without pg_read_all_stats.
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
        return Answer(
            None, "not recorded", f"{connection.display_name} does not show who locks a row"
        )
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


# --- primary keys as operators write and read them; a composite one is JSON, such as [3, 4]


def key_of(model: type[Model], text: str) -> Any:
    """Return the primary key that the text names.

    Raises ``ValidationError``, ``ValueError`` or ``TypeError`` for a text that is no key.
    """
    pk: Any = model._meta.pk
    found = pk.to_python(text)
    return tuple(found) if isinstance(found, list) else found


def key_text(pk: Any) -> str:
    """Return a primary key as ``key_of()`` reads it."""
    return json.dumps(pk, default=str) if isinstance(pk, tuple) else str(pk)
