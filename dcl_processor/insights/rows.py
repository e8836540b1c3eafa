"""The rows of a processor, by their state or by their key: what counts, shows and acts alike."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

from django.core.exceptions import ValidationError
from django.db.models import DateTimeField, F, IntegerField, Model, Q, QuerySet, TextField
from django.db.models.functions import Cast, Substr

from dcl_processor.insights.answer import TIMEOUT, Answer, Asker, How, Moment, document_of
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

#: Why a row is in doubt that has a claim's mark, and no lease.
UNLEASED = "it has the mark of a claim and no lease: a worker of another kind has left it"


def in_state(
    name: str, processor: Definition[Any], question: Question[Any], doubt_after: float | None = None
) -> QuerySet[Any, Any]:
    """Return the rows that are in one of ``STATES``: none, without a query, if none can be.

    ``doubt_after``: seconds after which a claim is in doubt, at least ``default_age()``. Raises
    ``NotRecordedError`` where rows may be in the state, but no column shows it.
    """
    pending, is_due = question.queryset, processor._due(question.model) or Q()
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
        case _:
            claimed = _claimed(name, processor, question, doubt_after or 0.0)
            return question.table.filter(claimed)


def _claimed(
    name: str, processor: Definition[Any], question: Question[Any], doubt_after: float
) -> Q:
    """Recognise a row that is in progress, or in doubt."""
    is_doubt = name == "in_doubt"
    if processor.is_transactional:
        if is_doubt:
            return states.NONE
        raise NotRecordedError("a TRANSACTIONAL worker only locks its row")
    if processor.lease is not None:
        unleased = states.is_unleased(processor, question)
        return unleased if is_doubt else states.is_in_progress(processor)
    if processor.claim is None or processor.claimed_at is None:
        raise NotRecordedError("set claim=… and claimed_at=…")
    # A worker may be at work on a younger claim: no action takes it, and so it is not counted.
    doubtful = states.is_in_doubt(processor, max(states.default_age(processor), doubt_after))
    return doubtful if is_doubt else states.claimed(processor) & ~doubtful


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
    on after an error of this ``kind``, ``None``: after any.
    """
    if keys is not None:
        return question.table.filter(pk__in=keys)
    if in_doubt is not None and processor.lease is None:
        age = max(states.default_age(processor), in_doubt)
        found = question.table.filter(states.is_in_doubt(processor, age))
        return of_kind(processor, found, kind)
    state = "given_up" if in_doubt is None else "in_doubt"
    return of_kind(processor, in_state(state, processor, question), kind)


# --- the rows of a state, in pages

#: What a table of rows has.
COLUMNS = ("key", "since", "attempts", "error", "remark")


@dataclass(frozen=True, slots=True)
class Listed:
    """A row. ``since``: when it was claimed, is tried again, or has begun to wait."""

    pk: Any
    since: Moment | None
    attempts: int | None
    error: str
    remark: str = ""

    @property
    def key(self) -> str:
        """The key of the row as an operator types it."""
        return key_text(self.pk)

    def as_dict(self) -> dict[str, Any]:
        """Return the row for JSON, and for a line of a table."""
        since, seconds = (None, None) if self.since is None else (self.since, self.since.seconds)
        known = {"key": self.key, "since": document_of(since), "seconds": seconds}
        return {**known, "attempts": self.attempts, "error": self.error, "remark": self.remark}


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
        is_unleased = state == "in_doubt" and processor.lease is not None
        remark = UNLEASED if is_unleased else ""
        # A filter over a to-many relation gives a row once per match.
        rows = {
            pk: Listed(pk, Moment.of(at, now), attempts, shown(error or "", LONGEST_TEXT), remark)
            for pk, at, now, attempts, error in read
        }
        return Answer(Page(tuple(rows.values()), read[-1][0] if len(read) == size else None))

    return Asker(processor, using, seconds).ask(page)


def _shown(processor: Definition[Any], state: str, found: QuerySet[Any, Any]) -> QuerySet[Any, Any]:
    retry: Any = processor.retry
    since: Any = processor.pending_since
    if state in ("in_progress", "in_doubt"):
        since = processor.claimed_at
    elif state == "later":
        since = retry and retry.next_attempt_at
    error: Any = retry and retry.last_error
    shows: QuerySet[Any, Any] = found.annotate(
        dcl_since=Cast(F(since) if isinstance(since, str) else since, DateTimeField()),
        dcl_now=DatabaseNow(),
        dcl_attempts=Cast(retry and F(retry.attempts), IntegerField()),
        dcl_error=Cast(error and Substr(error, 1, LONGEST_TEXT), TextField()),
    ).values_list("pk", "dcl_since", "dcl_now", "dcl_attempts", "dcl_error")
    return shows


# --- primary keys as operators write and read them; the columns of a composite one have commas


def key_of(model: type[Model], text: str) -> Any:
    """Return the primary key that the text names; columns of a composite key are joined by commas.

    A comma or a backslash in such a column follows a backslash, as ``key_text()`` writes it.
    Raises ``ValidationError`` or ``ValueError`` for a text that is no key.
    """
    fields = model._meta.pk_fields
    if len(fields) == 1:
        return _parsed(fields[0], text)
    parts = re.findall(r",((?:\\.|[^,\\])*)", f",{text}", re.DOTALL)
    texts = [re.sub(r"\\(.)", r"\1", part, flags=re.DOTALL) for part in parts]
    if len(texts) != len(fields):
        raise ValueError(f"expected {len(fields)} values joined by commas, got {text!r}")
    return tuple(_parsed(each, part) for each, part in zip(fields, texts, strict=True))


def _parsed(field: Any, text: str) -> Any:
    while field.remote_field:
        field = field.target_field
    try:
        return field.to_python(text)  # spaces may be a part of a text
    except (ValidationError, ValueError):
        return field.to_python(text.strip())


def key_text(pk: Any) -> str:
    """Return a primary key as ``key_of()`` reads it."""
    if not isinstance(pk, tuple):
        return str(pk)
    return ",".join(re.sub(r"([\\,])", r"\\\1", str(each)) for each in pk)


# --- rows by the class of their error


#: Characters of an error that are read, and those of the name of its class.
LONGEST_TEXT, LONGEST_KIND = 300, 100


@dataclass(frozen=True, slots=True)
class FailureGroup:
    """Rows whose last errors are of one class; ``example``: that of the row ``key``.

    ``kind``: empty for rows without an error.
    """

    kind: str
    rows: int
    example: str
    key: str

    def as_dict(self) -> dict[str, Any]:
        """Return the group for JSON."""
        return asdict(self)


def by_kind(
    processor: Definition[Any], found: QuerySet[Any, Any], *, most: int
) -> Answer[tuple[FailureGroup, ...]]:
    """Return the rows by the class of their last error; ``most``: rows that are read."""
    texts = found.annotate(dcl_error=Substr(error_column(processor), 1, LONGEST_TEXT))
    read = list(texts.values_list("pk", "dcl_error")[: most + 1])
    rows: dict[str, list[tuple[Any, str]]] = {}
    for pk, text in read[:most]:
        rows.setdefault(kind_of(text or ""), []).append((pk, text or ""))
    groups = [
        FailureGroup(kind, len(some), shown(some[0][1], LONGEST_TEXT), key_text(some[0][0]))
        for kind, some in sorted(rows.items(), key=lambda each: -len(each[1]))
    ]
    return Answer(tuple(groups), How.MORE_THAN if len(read) > most else How.EXACT)


def kind_of(text: str) -> str:
    """Return the class of an error as ``Retry`` writes it, or the text's beginning, masked."""
    return printable(masked(text).partition(":")[0])[:LONGEST_KIND]


def of_kind(
    processor: Definition[Any], found: QuerySet[Any, Any], kind: str | None
) -> QuerySet[Any, Any]:
    """Return those of the rows whose last error is of this class; ``None``: of any."""
    if kind is None:
        return found
    column = error_column(processor)
    none, more = f"{column}__isnull", f"{column}__startswith"
    other = Q(**{more: f"{kind}:"}) if kind else Q(**{none: True})
    return found.filter(Q(**{column: kind}) | other)


def error_column(processor: Definition[Any]) -> str:
    """Return the column of the last error; without one, no rows would look like good news."""
    column = processor.retry.last_error if processor.retry else None
    if column is None:
        raise NotRecordedError("set retry=Retry(…) with last_error, which stores the last error")
    return column
