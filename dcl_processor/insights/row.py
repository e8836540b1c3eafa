"""Why one row is handled, or not."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from django.db.models import Model, Q

from dcl_processor.insights import rows
from dcl_processor.insights.answer import TIMEOUT, Answer, Asker, How, Moment, document_of
from dcl_processor.insights.held import in_flight
from dcl_processor.insights.locks import Holder, holders
from dcl_processor.insights.rows import key_text
from dcl_processor.keys.claim import in_order
from dcl_processor.keys.columns import column_of
from dcl_processor.operator.states import claimed, flag, is_timeless
from dcl_processor.operator.times import span, utc_text
from dcl_processor.options.model_columns import own_columns
from dcl_processor.options.options import Definition
from dcl_processor.pending.clock import DatabaseNow
from dcl_processor.pending.question import Question, these
from dcl_processor.report.errors import masked, shown

#: Rows that hold a key, which are named, and characters of the key of each.
_MOST_NAMED, _LONGEST_KEY = 3, 80

_RUNS = "a run would handle it now"

#: What no column shows of a group whose workers only lock their rows and their key.
_UNSEEN = ", unless a worker has another row of its group"


@dataclass(frozen=True, slots=True)
class Row:
    """What is known of one row.

    ``reason``: why a run would handle it now, or not. ``parts``: the parts of that question, with
    their answers: ``exists``, ``pending``, ``due`` (no retry time is in the way),
    ``attempts_left``, ``lease_free``, ``unclaimed``, ``key_free`` (no other row of its key is in
    the way) and ``given_up``; those that the processor does not have are left out. ``columns``:
    those of its retry, its lease, its claim and its key, and that of ``pending_since``.
    """

    name: str
    pk: Any
    using: str | None
    reason: str
    parts: Mapping[str, Answer[bool]]
    columns: Mapping[str, Any] = field(default_factory=dict)
    locked: Answer[tuple[Holder, ...]] | None = None

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
    processor: Definition[Any], pk: Any, *, using: str | None = None, seconds: float = TIMEOUT
) -> Row:
    """Return what is known of the row with this primary key; what is not is in the answers."""
    asker = Asker(processor, using, seconds)
    read = asker.ask(lambda question: _columns(processor, question, pk))
    if read.value is None:
        is_known = read.how is not How.UNKNOWN
        exists: Answer[bool] = Answer(False if is_known else None, read.how, read.why)
        reason = "there is no row with this key" if is_known else _unknown(read.why)
        return Row(processor.name, pk, asker.using, reason, {"exists": exists})
    columns = read.value
    parts = {"exists": Answer(True)}
    parts["pending"] = asker.ask(lambda asked: Answer(asked.still_pending([pk]).exists()))
    for name in [name for name in columns if name.startswith(_PART)]:
        parts[name.removeprefix(_PART)] = Answer(bool(columns.pop(name)))
    holds = asker.ask(lambda asked: Answer(_holds(processor, asked, pk, columns)))
    if holds.how is How.UNKNOWN:
        parts["key_free"] = Answer.unknown(holds.why)
    elif holds.value or (holds.value is not None and not processor.is_transactional):
        parts["key_free"] = Answer(not holds.value)
    parts["given_up"] = asker.ask(
        lambda asked: Answer(
            rows.in_state("given_up", processor, asked).filter(these([pk])).exists()
        )
    )
    is_left = asker.ask(
        lambda asked: Answer(
            rows.in_state("in_doubt", processor, asked).filter(these([pk])).exists()
        )
    )
    now, error = columns.pop("dcl_now"), processor.retry and processor.retry.last_error
    if error and columns.get(error):
        columns[error] = masked(columns[error])
    locked = asker.ask(lambda asked: holders(asked, pk))
    if processor.lease is not None and is_left.value:
        reason = f"{rows.UNLEASED}; requeue or mark-done it"
    else:
        reason = _reason(processor, parts, columns, now, holds.value or "") or _locked(locked)
    is_unseen = holds.value == "" and processor.is_transactional and reason == _RUNS
    reason += _UNSEEN if is_unseen else ""
    return Row(processor.name, pk, asker.using, reason, parts, columns, locked)


#: Begins the names of the columns of a read that are conditions.
_PART = "dcl_part_"


def _conditions(processor: Definition[Any], model: type[Model]) -> dict[str, Q]:
    """Return the conditions, besides ``pending``, that the processor's options add."""
    retry, found = processor.retry, dict[str, Q | None]()
    if retry is not None:
        found |= {"due": retry.due(), "attempts_left": retry.has_attempts_left(model)}
    if processor.lease is not None:
        found["lease_free"] = processor.lease.free()
    elif processor.claimed_at is not None:
        found["unclaimed"] = ~claimed(processor)
    return {name: each for name, each in found.items() if each is not None}


def _columns(
    processor: Definition[Any], question: Question[Any], pk: Any
) -> Answer[dict[str, Any]]:
    """Read the row's columns, its conditions and the clock by one statement."""
    since, model = processor.pending_since, question.model
    names = [*own_columns(processor)]
    names += [column_of(processor, "group_by", model)] if processor.group_by else []
    names += [since] if isinstance(since, str) else []
    parts = _conditions(processor, model)
    added: dict[str, Any] = {f"{_PART}{name}": flag(each) for name, each in parts.items()}
    found = question.table.filter(these([pk])).annotate(**added, dcl_now=DatabaseNow())
    known = found.order_by().values(*dict.fromkeys(names), "dcl_now", *added)
    return Answer(next(iter(known[:1]), None))


def _holds(
    processor: Definition[Any], question: Question[Any], pk: Any, columns: Mapping[str, Any]
) -> str | None:
    """Return what keeps the row's key from it, empty if nothing does; ``None``: it has no key."""
    if processor.group_by is None:
        return None
    column = column_of(processor, "group_by", question.model)
    key, most = {column: columns[column]}, processor.most_of_a_key or 1
    if columns[column] is None:
        return None
    at_work = in_flight(processor, question)
    if at_work is not None:
        others = at_work.filter(**key).exclude(these([pk])).order_by("pk")
        pks = list(others.values_list("pk", flat=True)[: max(most, _MOST_NAMED)])
        if len(pks) >= most:
            named = ", ".join(shown(key_text(each), _LONGEST_KEY) for each in pks[:_MOST_NAMED])
            return f" by row{'s' if len(pks) > 1 else ''} {named}"
    if processor.in_order:
        mine = in_order(question.unfiltered.filter(**key))
        first = next(iter(mine.values_list("pk", flat=True)[:1]), pk)
        if first != pk:
            return f" by row {shown(key_text(first), _LONGEST_KEY)}, which comes first"
    return ""


def _reason(
    processor: Definition[Any],
    parts: Mapping[str, Answer[bool]],
    columns: Mapping[str, Any],
    now: Any,
    holds: str,
) -> str:
    """Return why no run handles the row now; empty: the row's columns do not prevent it."""
    no = {name for name, part in parts.items() if part.value is False}
    retry, lease = processor.retry, processor.lease
    if lease is not None and "lease_free" in no:
        return f"a worker has it, and its lease ends at {utc_text(columns[lease.field])}"
    if "unclaimed" in no:
        since = Moment.of(columns[processor.claimed_at or ""], now)
        return (
            f"it was claimed {span(since.seconds if since else 0)} ago and is not settled: its "
            "handler is at work, or its process died, and then the row is in doubt"
        )
    if parts["given_up"].value:
        error = shown(columns.get(retry.last_error or "") or "", 200) if retry else ""
        return "it was given up on" + (f": {error}" if error else "")
    if "pending" in no:
        is_blind = processor.claim is not None and is_timeless(processor)
        state = "claimed, done, or does not wait; set claimed_at=…"
        return f"it is not in pending: it is {state if is_blind else 'done, or does not wait yet'}"
    if retry is not None and "due" in no:
        return f"its next attempt is at {utc_text(columns[retry.next_attempt_at or ''])}"
    return _of_others(no, parts, holds)


def _of_others(no: Collection[str], parts: Mapping[str, Answer[bool]], holds: str) -> str:
    if holds:
        return f"its group is in use{holds}"
    for part in parts.values():
        if part.how is How.UNKNOWN:
            return _unknown(part.why)
    # Otherwise the row would be given up on.
    return "the next run writes failed to it" if "attempts_left" in no else ""


def _locked(found: Answer[tuple[Holder, ...]]) -> str:
    """Return what the row's lock says, if nothing else keeps it from being handled."""
    if found.value is None:
        return f"{_RUNS}, unless a session has locked it"
    if not found.value:
        return _RUNS
    return "a session has locked it, or has only inserted a row that refers to it"


def _unknown(why: str) -> str:
    return f"could not be found out: {why}"
