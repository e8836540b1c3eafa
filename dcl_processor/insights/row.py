"""Why one row is handled, or not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from django.db.models import Model, Q

from dcl_processor.candidates.groups import head, in_flight
from dcl_processor.definition.groups import Key, groups_of
from dcl_processor.operator.states import claimed, flag, is_timeless
from dcl_processor.operator.times import span, utc_text
from dcl_processor.options.model_columns import own_columns
from dcl_processor.pending.clock import DatabaseNow
from dcl_processor.pending.question import Question, these
from dcl_processor.processor import BatchProcessor
from dcl_processor.report.errors import masked, shown

from . import rows
from .answer import TIMEOUT, Answer, Asker, How, Moment, document_of
from .locks import Locked, locked
from .rows import key_text

#: Rows that hold a key, which are named, and characters of the key of each.
_MOST_NAMED, _LONGEST_KEY = 3, 80

_IN_USE, _RUNS = "its group is in use", "a run would handle it now"

#: What no column shows of a group whose workers only lock their rows and their key.
_UNSEEN = ", unless a worker has another row of its group"


@dataclass(frozen=True, slots=True)
class Row:
    """What is known of one row.

    ``reason``: why a run would handle it now, or not. ``parts``: the parts of that question, with
    their answers: ``exists``, ``pending``, ``due`` (no retry time is in the way),
    ``attempts_left``, ``lease_free``, ``unclaimed``, ``key_free`` (no other row of its group is in
    the way) and ``given_up``; those that the processor does not have are left out. ``columns``:
    those of its retry, its lease, its claim and its group, and that of ``pending_since``.
    """

    name: str
    pk: Any
    using: str
    reason: str
    parts: Mapping[str, Answer[bool]]
    columns: Mapping[str, Any] = field(default_factory=dict)
    locked: Answer[Locked] | None = None

    @property
    def exists(self) -> bool:
        return self.parts["exists"].value is not False

    @property
    def is_complete(self) -> bool:
        """Whether each part of the question has an answer."""
        return all(part.how is not How.UNKNOWN for part in self.parts.values())

    def as_dict(self) -> dict[str, Any]:
        """Return the row for JSON."""
        return {
            "name": self.name,
            "pk": key_text(self.pk),
            "database": self.using,
            "reason": self.reason,
            "parts": {name: part.as_dict() for name, part in self.parts.items()},
            "columns": {name: document_of(value) for name, value in self.columns.items()},
            "locked": self.locked and self.locked.as_dict(),
        }


def show(
    processor: BatchProcessor[Any], pk: Any, *, using: str | None = None, seconds: float = TIMEOUT
) -> Row:
    """Return what is known of the row with this primary key.

    Raises the errors of the processor's ``pending``; an error of the database is in the answers.
    """
    question = rows.question_of(processor, using)
    asker = Asker(processor, seconds)
    using = question.using
    read = asker.ask(using, lambda: _columns(processor, question, pk))
    if read.value is None:
        exists: Answer[bool] = Answer(
            None if read.how is How.UNKNOWN else False, read.how, read.why
        )
        reason = _unknown(read.why) if read.how is How.UNKNOWN else "there is no row with this key"
        return Row(processor.name, pk, using, reason, {"exists": exists})
    columns = read.value
    of_group, hold = _key_free(asker, processor, question, pk, columns)

    def is_given_up() -> Answer[bool]:
        found = rows.in_state("given_up", processor, question)
        return Answer(found.filter(these([pk])).exists())

    parts = {
        "exists": Answer(True),
        "pending": asker.ask(using, lambda: Answer(question.still_pending([pk]).exists())),
        **{
            name: Answer(bool(columns.pop(f"dcl_{name}")))
            for name in _conditions(processor, question.model)
        },
        **of_group,
        "given_up": asker.ask(using, is_given_up),
    }
    now = columns.pop("dcl_now")
    _mask_error(processor, columns)
    holders = asker.ask(using, lambda: locked(question, [pk]))
    reason = _reason(processor, parts, columns, now) or _lock_reason(holders)
    reason += hold if reason in (_IN_USE, _RUNS) else ""
    return Row(processor.name, pk, using, reason, parts, columns, holders)


def _conditions(processor: BatchProcessor[Any], model: type[Model]) -> dict[str, Q]:
    """Return the conditions, besides ``pending``, that the processor's options add."""
    conditions: dict[str, Q] = {}
    if processor.retry is not None:
        of_retry = {
            "due": processor.retry.due(),
            "attempts_left": processor.retry.has_attempts_left(model),
        }
        conditions = {name: each for name, each in of_retry.items() if each is not None}
    if processor.lease is not None:
        conditions["lease_free"] = processor.lease.free()
    elif processor.claimed_at is not None:
        conditions["unclaimed"] = ~claimed(processor)
    return conditions


def _columns(
    processor: BatchProcessor[Any], question: Question[Any], pk: Any
) -> Answer[dict[str, Any]]:
    """Read the row's columns, its conditions and the clock by one statement."""
    names = [
        *own_columns(processor),
        *([groups_of(processor, question.model).column] if processor.group_by else []),
        *([processor.pending_since] if isinstance(processor.pending_since, str) else []),
    ]
    added: dict[str, Any] = {
        f"dcl_{name}": flag(condition)
        for name, condition in _conditions(processor, question.model).items()
    }
    rows_ = question.table.filter(these([pk])).annotate(**added, dcl_now=DatabaseNow())
    found = list(rows_.order_by().values(*dict.fromkeys(names), "dcl_now", *added)[:1])
    if not found:
        return Answer(None)
    return Answer(found[0])


def _key_free(
    asker: Asker,
    processor: BatchProcessor[Any],
    question: Question[Any],
    pk: Any,
    columns: Mapping[str, Any],
) -> tuple[dict[str, Answer[bool]], str]:
    """Return whether the other rows of its group leave a place for the row, and what does not."""
    if processor.group_by is None:
        return {}, ""
    groups = groups_of(processor, question.model)
    value = columns[groups.column]
    if value is None:
        return {}, ""  # a row of its own
    found = asker.ask(question.using, lambda: Answer(_hold(question, Key(groups, value), pk)))
    if found.value is None:
        return {"key_free": Answer.unknown(found.why)}, ""
    if not found.value and groups.in_flight is None:
        return {}, _UNSEEN
    return {"key_free": Answer(not found.value)}, found.value


def _hold(question: Question[Any], key: Key, pk: Any) -> str:
    """Return what holds the key, apart from the row itself; empty: the row has a place."""
    most = key.groups.most or 1
    others = in_flight(question, key).exclude(these([pk])).order_by("pk")
    at_work = list(others.values_list("pk", flat=True)[: max(most, _MOST_NAMED)])
    if len(at_work) >= most:
        named = ", ".join(shown(key_text(each), _LONGEST_KEY) for each in at_work[:_MOST_NAMED])
        return f" by row{'s' if len(at_work) > 1 else ''} {named}"
    first = head(question, key) if key.groups.in_order else None
    if first in {pk, None}:
        return ""
    return f" by row {shown(key_text(first), _LONGEST_KEY)}, which comes first"


def _reason(
    processor: BatchProcessor[Any],
    parts: Mapping[str, Answer[bool]],
    columns: Mapping[str, Any],
    now: Any,
) -> str:
    """Return why no run handles the row now; empty: the row's columns do not prevent it."""
    if held := _held(processor, parts, columns, now):
        return held
    retry = processor.retry
    if parts["given_up"].value:
        error = shown(columns.get(retry.last_error or "") or "", 200) if retry else ""
        return "it was given up on" + (f": {error}" if error else "")
    if _no(parts, "pending"):
        if processor.claim is not None and is_timeless(processor):
            return "it is not in pending: it is claimed, done, or does not wait; set claimed_at=…"
        return "it is not in pending: it is done, or does not wait yet"
    if retry is not None and _no(parts, "due"):
        return f"its next attempt is at {utc_text(columns[retry.next_attempt_at or ''])}"
    if _no(parts, "key_free"):
        return _IN_USE
    if unknown := [part.why for part in parts.values() if part.how is How.UNKNOWN]:
        return _unknown(unknown[0])
    # Otherwise the row would be given up on.
    return "" if not _no(parts, "attempts_left") else "the next run writes failed to it"


def _held(
    processor: BatchProcessor[Any],
    parts: Mapping[str, Answer[bool]],
    columns: Mapping[str, Any],
    now: Any,
) -> str:
    """Return which mark of a worker the row has."""
    if processor.lease is not None and _no(parts, "lease_free"):
        until = utc_text(columns[processor.lease.field])
        return f"a worker has it, and its lease ends at {until}"
    if _no(parts, "unclaimed"):
        seconds = Moment.of(columns[processor.claimed_at or ""], now).seconds
        return (
            f"it was claimed {span(seconds)} ago and is not settled: its handler is at work, or "
            "its process died, and then the row is in doubt"
        )
    return ""


def _mask_error(processor: BatchProcessor[Any], columns: dict[str, Any]) -> None:
    name = processor.retry.last_error if processor.retry else None
    if name is not None and columns.get(name):
        columns[name] = masked(columns[name])


def _no(parts: Mapping[str, Answer[bool]], name: str) -> bool:
    return name in parts and parts[name].value is False


def _lock_reason(holders: Answer[Locked]) -> str:
    """Return what the row's lock says, if nothing else keeps it from being handled."""
    if holders.value is None:
        return f"{_RUNS}, unless a session has locked it"
    if holders.value.rows and all(each.mode is None for each in holders.value.holders):
        return "a session has locked it, or has only inserted a row that refers to it"
    return "a session has locked it" if holders.value.rows > 0 else _RUNS


def _unknown(why: str) -> str:
    return f"could not be found out: {why}"
