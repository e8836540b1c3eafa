"""Why one row is handled, or not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from django.db.models import Q

from dcl_processor.insights.answer import TIMEOUT, Answer, Asker, document_of
from dcl_processor.insights.held import in_flight
from dcl_processor.insights.locks import holders
from dcl_processor.insights.rows import UNLEASED, key_text
from dcl_processor.keys.claim import in_order
from dcl_processor.keys.columns import column_of
from dcl_processor.operator import states
from dcl_processor.operator.times import span, utc, utc_text
from dcl_processor.options.model_columns import own_columns
from dcl_processor.options.options import Definition
from dcl_processor.pending.clock import DatabaseNow
from dcl_processor.pending.question import Question, these
from dcl_processor.report.errors import masked, shown

#: Rows that hold a key, which are named, and characters of the key of each.
_MOST_NAMED, _LONGEST_KEY = 3, 80

#: Begins the names of the columns of a read that are conditions.
_PART = "dcl_part_"

_IN_USE, _RUNS = "its group is in use", "a run would handle it now"

#: What no column shows of a group whose workers only lock their rows and their key.
_UNSEEN = ", unless a worker has another row of its group"


@dataclass(frozen=True, slots=True)
class Row:
    """What is known of one row.

    ``reason``: why a run would handle it now, or not. ``parts``: whether it is ``pending``, and
    ``due`` (no retry time is in the way), and has ``attempts_left``; whether it is ``lease_free``
    or ``unclaimed``, ``key_free`` (no other row of its key is in the way), and ``given_up``; those
    that the processor does not have are left out. ``columns``: those of its retry, its lease, its
    claim and its key, and that of ``pending_since``. ``locked``: the sessions that have locked it.
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
    reason = found.value.reason
    if reason.startswith(_RUNS) and locked.value is None:
        reason = f"{_RUNS}, unless a session has locked it"
    elif reason.startswith(_RUNS) and locked.value:
        reason = "a session has locked it, or has only inserted a row that refers to it"
    return Answer(replace(found.value, reason=reason, locked=locked))


def _read(processor: Definition[Any], question: Question[Any], pk: Any) -> Row | None:
    """Read the row's columns, its conditions and the clock by one statement."""
    since, key = processor.pending_since, None
    names = [*own_columns(processor), *([since] if isinstance(since, str) else [])]
    if processor.group_by is not None:
        key = column_of(processor, "group_by", question.model)
        names.append(key)
    asked = {name: states.flag(each) for name, each in _conditions(processor, question).items()}
    found = question.table.filter(these([pk])).order_by()
    found = found.annotate(**{f"{_PART}{name}": each for name, each in asked.items()})
    known = found.annotate(dcl_now=DatabaseNow()).values(
        *dict.fromkeys(names), "dcl_now", *(f"{_PART}{name}" for name in asked)
    )
    for read in known[:1]:
        columns = dict(read)
        parts = {name: bool(columns.pop(f"{_PART}{name}")) for name in asked}
        holds = None
        if key is not None and columns[key] is not None:
            holds = _holds(processor, question, pk, {key: columns[key]})
            if holds or not processor.is_transactional:
                parts["key_free"] = not holds
        reason = _reason(processor, parts, columns, columns.pop("dcl_now"))
        reason += holds or "" if reason == _IN_USE else ""
        is_unseen = holds == "" and "key_free" not in parts
        reason += _UNSEEN if reason == _RUNS and is_unseen else ""
        error = processor.retry.last_error if processor.retry is not None else None
        if error and columns[error]:
            columns[error] = masked(columns[error])
        parts.pop("unleased")
        return Row(processor.name, pk, question.using, reason, parts, columns, Answer(()))
    return None


def _conditions(processor: Definition[Any], question: Question[Any]) -> dict[str, Q]:
    """Return the conditions that decide whether the row is handled."""
    retry, found = processor.retry, dict[str, Q | None]()
    found["pending"] = states.is_pending(question)
    if retry is not None:
        found["due"], found["attempts_left"] = retry.due(), retry.has_attempts_left(question.model)
    if processor.lease is not None:
        found["lease_free"] = processor.lease.free()
    elif processor.claimed_at is not None:
        found["unclaimed"] = ~states.claimed(processor)
    found["given_up"] = states.is_given_up(processor, question)
    found["unleased"] = states.is_unleased(processor, question)
    return {name: each for name, each in found.items() if each is not None}


def _holds(
    processor: Definition[Any], question: Question[Any], pk: Any, key: Mapping[str, Any]
) -> str:
    """Return what keeps the row's key from it; empty: nothing that columns show."""
    most, at_work = processor.most_of_a_key or 1, in_flight(processor, question)
    if at_work is not None:
        others = at_work.filter(**key).exclude(these([pk])).order_by("pk")
        pks = list(others.values_list("pk", flat=True)[: max(most, _MOST_NAMED)])
        if len(pks) >= most:
            named = ", ".join(shown(key_text(each), _LONGEST_KEY) for each in pks[:_MOST_NAMED])
            return f" by row{'s' if len(pks) > 1 else ''} {named}"
    if processor.in_order:
        mine = in_order(question.unfiltered.filter(**key)).values_list("pk", flat=True)
        first = next(iter(mine[:1]), pk)
        if first != pk:
            return f" by row {shown(key_text(first), _LONGEST_KEY)}, which comes first"
    return ""


def _reason(
    processor: Definition[Any], parts: Mapping[str, bool], columns: Mapping[str, Any], now: Any
) -> str:
    """Return why no run handles the row now; or that its columns do not prevent it."""
    no = {name for name, part in parts.items() if not part}
    retry, lease, since = processor.retry, processor.lease, processor.claimed_at
    if parts["unleased"]:
        return f"{UNLEASED}; requeue or mark-done it"
    if lease is not None and "lease_free" in no:
        return f"a worker has it, and its lease ends at {utc_text(columns[lease.field])}"
    if since is not None and "unclaimed" in no:
        seconds = (utc(now) - utc(columns[since])).total_seconds()
        return (
            f"it was claimed {span(seconds)} ago and is not settled: its handler is at work, or "
            "its process died, and then the row is in doubt"
        )
    if parts["given_up"]:
        error = shown(columns.get(retry.last_error or "") or "", 200) if retry else ""
        return "it was given up on" + (f": {error}" if error else "")
    if "pending" in no:
        is_blind = processor.claim is not None and states.is_timeless(processor)
        state = "claimed, done, or does not wait; set claimed_at=…"
        return f"it is not in pending: it is {state if is_blind else 'done, or does not wait yet'}"
    if retry is not None and "due" in no:
        return f"its next attempt is at {utc_text(columns[retry.next_attempt_at or ''])}"
    if "key_free" in no:
        return _IN_USE
    # Otherwise the row would be given up on.
    return "the next run writes failed to it" if "attempts_left" in no else _RUNS
