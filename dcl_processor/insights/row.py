"""Why one row is handled, or not: the states that it is in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from django.db.models import Exists, OuterRef

from dcl_processor.insights.answer import TIMEOUT, Answer, Asker, document_of
from dcl_processor.insights.locks import holders
from dcl_processor.insights.rows import LONGEST_TEXT, STATES, in_state, key_text
from dcl_processor.keys.columns import column_of
from dcl_processor.operator.states import NotRecordedError, is_timeless
from dcl_processor.operator.times import utc_text
from dcl_processor.options.model_columns import own_columns
from dcl_processor.options.options import Definition
from dcl_processor.pending.question import Question, these
from dcl_processor.report.errors import masked, shown

#: Begins the names of the columns of a read that are conditions.
_STATE = "dcl_state_"

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
        return found
    locked = asker.ask(lambda question: holders(question, pk))
    return Answer(replace(found.value, locked=locked))


def _read(processor: Definition[Any], question: Question[Any], pk: Any) -> Row | None:
    """Read the row's columns and its states by one statement."""
    since, names = processor.pending_since, own_columns(processor)
    if isinstance(since, str):
        names.append(since)
    if processor.group_by is not None:
        names.append(column_of(processor, "group_by", question.model))
    asked = _states(processor, question)
    found = question.table.filter(these([pk])).order_by().annotate(**asked)
    for read in found.values(*dict.fromkeys(names), *asked)[:1]:
        parts = {name.removeprefix(_STATE): read.pop(name) for name in asked}
        error = processor.retry.last_error if processor.retry else None
        if error is not None:
            read[error] = masked(read[error] or "")
        reason = _reason(processor, parts, read)
        return Row(processor.name, pk, question.using, reason, parts, read, Answer(()))
    return None


def _states(processor: Definition[Any], question: Question[Any]) -> dict[str, Any]:
    """Return, as columns of a read, whether a row is in each state that is recorded."""
    found: dict[str, Any] = {}
    for name in STATES:
        try:
            rows = in_state(name, processor, question).using(question.using).order_by()
        except NotRecordedError:
            continue
        found[f"{_STATE}{name}"] = Exists(rows.filter(pk=OuterRef("pk")))
    return found


def _reason(processor: Definition[Any], parts: Mapping[str, bool], columns: Any) -> str:
    is_in = [name for name in REASONS if parts.get(name)]
    if not is_in:
        claimed = "claimed, " if processor.claim is not None and is_timeless(processor) else ""
        return f"it is not in pending: it is {claimed}done, or does not wait yet"
    at, error, retry = None, "", processor.retry
    if retry is not None:
        at, error = columns.get(retry.next_attempt_at), columns.get(retry.last_error)
    said = f": {shown(error, LONGEST_TEXT)}" if error else ""
    return REASONS[is_in[0]].format(time=at and utc_text(at), error=said)
