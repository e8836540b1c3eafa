"""The rows of a processor, by their state or by their key: what counts, shows and acts alike."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from django.db.models import DateTimeField, F, IntegerField, Model, Q, QuerySet, TextField
from django.db.models.functions import Cast, Substr

from dcl_processor.insights.answer import TIMEOUT, Answer, Asker, Moment, document_of
from dcl_processor.insights.held import held
from dcl_processor.operator import states
from dcl_processor.operator.backlog import question_of
from dcl_processor.operator.states import NotRecordedError
from dcl_processor.options.options import Definition
from dcl_processor.pending.clock import DatabaseNow
from dcl_processor.pending.question import Question
from dcl_processor.report.errors import masked, printable, shown

__all__ = ["NotRecordedError", "question_of"]

#: The states that rows are counted, shown and filtered by.
STATES = ("pending", "due", "held", "later", "in_progress", "in_doubt", "given_up")


def in_state(
    name: str, processor: Definition[Any], question: Question[Any], doubt_after: float | None = None
) -> QuerySet[Any, Any]:
    """Return the rows that are in one of ``STATES``: none, without a query, if none can be.

    ``doubt_after``: seconds after which a claim is in doubt, at least ``default_age()``. Raises
    ``NotRecordedError`` where rows may be in the state, but no column shows it.
    """
    pending, is_due = question.queryset, processor._due(question.model) or Q()
    # A worker may be at work on a younger claim: no action takes it, and so it is not counted.
    age = max(states.default_age(processor), doubt_after or 0.0)
    match name:
        case "pending":
            return pending
        case "due":  # what a run would try now, if no session has it locked
            return pending.filter(is_due, ~held(processor, question))
        case "held":
            return pending.filter(is_due, held(processor, question))
        case "later":
            return pending.filter(states.is_later(processor))
        case "given_up":
            return states.given_up(processor, question)
        case "in_progress":
            return question.table.filter(states.is_in_progress(processor, question, age))
        case _:
            return question.table.filter(states.is_in_doubt(processor, question, age))


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

#: What a table of rows has.
COLUMNS = ("key", "since", "attempts", "error")

#: Characters of an error that are read, and those of the name of its class.
LONGEST_TEXT, LONGEST_KIND = 300, 100


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
    kind: str | None = None,
    after: Any = None,
    size: int = 500,
) -> Answer[Page]:
    """Return a page of the rows in one of ``STATES``; raises no error.

    ``kind``: only those whose last error is of this class; ``after``: that of the page before.
    """

    def page(question: Question[Any]) -> Answer[Page]:
        found = in_state(state, processor, question, doubt_after).using(question.using)
        found = of_kind(processor, found, kind).order_by("pk")
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
