"""What an operator does with rows that are in doubt, or were given up.

The rows are chosen first, and then written to, each under its lock, if they still are as they were
when they were chosen.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

from django.db import DatabaseError
from django.db.models import Model, Q, QuerySet

from dcl_processor.engine.bookkeeping import with_cleared_retry
from dcl_processor.exceptions import InvalidOption
from dcl_processor.operator import states
from dcl_processor.operator.states import default_age, flag, is_claimed, is_pending, question_of
from dcl_processor.operator.times import time_limit
from dcl_processor.options.kinds import Delivery
from dcl_processor.options.model_columns import check_columns, written_columns
from dcl_processor.options.options import Definition
from dcl_processor.pending import steady as time
from dcl_processor.pending.question import Question, these
from dcl_processor.pending.scan import WINDOW
from dcl_processor.report.outcomes import Discard
from dcl_processor.report.values import TEN_YEARS, Values, expect_seconds
from dcl_processor.sql import isolation, steps
from dcl_processor.sql.errors import is_contention, is_statement_timeout
from dcl_processor.sql.session import Session

logger = logging.getLogger("dcl_processor")

#: Keys that are shown of rows that an action leaves.
SHOWN = 5

#: Seconds that the statements of an action may take together, such as for a lock of the table.
LONGEST = 10.0

#: The actions, and what has been done to the rows of one.
DID = {"requeue": "put back into pending", "mark_done": "marked as done", "discard": "discarded"}

#: Why a row that was chosen is left all the same.
CHANGED, LOCKED = "changed since the choice", "locked by other sessions, or deleted"


def in_doubt(processor: Definition[Any], older_than: float | timedelta) -> QuerySet[Any, Any]:
    """Return the rows that have been claimed for longer than ``older_than``, the oldest first."""
    if processor.lease is not None:
        raise InvalidOption(
            f"{processor.name}: expected a processor without a lease for in_doubt(), got "
            f"{processor.lease!r}, after which another worker takes a row over; use in_progress()."
        )
    _expect_claim(processor, "in_doubt")
    expect_seconds(f"{processor.name}: expected older_than", older_than, most=TEN_YEARS)
    question = question_of(processor)
    doubtful = states.is_in_doubt(processor, question, older_than)
    return question.table.filter(doubtful).order_by(processor.claimed_at or "pk", "pk")


def in_progress(processor: Definition[Any]) -> QuerySet[Any, Any]:
    """Return the rows that a worker has claimed or leased, the longest-held first."""
    held, since, lease = states.claimed(processor), processor.claimed_at, processor.lease
    if lease is None:
        _expect_claim(processor, "in_progress")
    else:
        held, since = held & lease.alive(), since or lease.field
    return question_of(processor).table.filter(held).order_by(since or "pk", "pk")


def _expect_claim(processor: Definition[Any], method: str) -> None:
    if processor.claim is None or processor.claimed_at is None:
        raise InvalidOption(
            f"{processor.name}: expected claim=… and claimed_at=… for {method}(), got a processor "
            "without both; add them, so that each claim records its time."
        )


# --- the three actions


def to_mark_done(
    processor: Definition[Any],
    rows: QuerySet[Any, Any],
    values: Values | None = None,
    *,
    force: bool = False,
) -> Write:
    """Return what ``mark_done()`` writes, and to which rows."""
    question = _question(processor, rows, "mark_done")
    flip = _values(processor, "mark_done", "done", values, question.model)
    stuck = is_claimed(processor, question) | states.is_given_up(processor, question)
    need, done = ("neither claimed nor given up", stuck), with_cleared_retry(processor, flip)
    return Write(processor, question, rows, "mark_done", need=need, values=done, force=force)


def to_requeue(
    processor: Definition[Any], rows: QuerySet[Any, Any], *, force: bool = False
) -> Write:
    """Return what ``requeue()`` writes, and to which rows."""
    put_back = values_to_put_back(processor)
    if put_back is None:
        raise InvalidOption(
            f"{processor.name}: expected reset=… for requeue(), got a processor without reset; set "
            "it to the values that put a row back into pending."
        )
    question = _question(processor, rows, "requeue")
    waits = is_pending(question)
    if processor.reset is None:
        need, force = ("not in pending: set reset=… to put it back", waits), False
    else:
        waits |= is_claimed(processor, question) | states.is_given_up(processor, question)
        need = "done, or not waiting yet; force puts it back, and repeats its effect", waits
    reset = with_cleared_retry(processor, put_back)
    return Write(processor, question, rows, "requeue", need=need, values=reset, force=force)


def to_discard(
    processor: Definition[Any],
    rows: QuerySet[Any, Any],
    reason: str = "",
    values: Values | None = None,
    *,
    force: bool = False,
) -> Write:
    """Return what ``discard()`` writes, and to which rows."""
    question = _question(processor, rows, "discard")
    dead_letter = _values(processor, "discard", "failed", values, question.model)
    retry = processor.retry
    if retry is not None:
        noted = retry.given_up(Discard(reason), 0, question.model)
        noted.pop(retry.attempts, None)  # no attempt was made
        dead_letter = {**noted, **dead_letter}
    need = "neither pending nor claimed", is_pending(question) | is_claimed(processor, question)
    return Write(processor, question, rows, "discard", need=need, values=dead_letter, force=force)


def to_act(
    action: str,
    processor: Definition[Any],
    rows: QuerySet[Any, Any],
    *,
    values: Values | None = None,
    reason: str = "",
    force: bool = False,
) -> Write:
    """Return what the action of this name writes, and to which rows."""
    match action:
        case "requeue":
            return to_requeue(processor, rows, force=force)
        case "mark_done":
            return to_mark_done(processor, rows, values, force=force)
        case _:
            return to_discard(processor, rows, reason, values, force=force)


def values_to_put_back(processor: Definition[Any]) -> Values | None:
    """Return what puts a row back into ``pending``, apart from its retry; ``None``: not known.

    Of a row that nothing but ``done`` takes out of ``pending``, only the attempts are cleared.
    """
    if processor.reset is not None or processor.retry is None:
        return processor.reset
    is_hidden = processor.claim is not None or processor.delivery == Delivery.AT_MOST_ONCE
    return None if is_hidden or processor._has_dead_letter else {}


def _values(
    processor: Definition[Any], method: str, option: str, values: Any, model: type[Model]
) -> Values:
    """Return the values of the option that take a row out of ``pending``, and the operator's."""
    own, given = getattr(processor, option) or {}, values or {}
    # A row that keeps its claim, and not the claim's time, would be in no state.
    if not own and not (given and given.keys() >= {*(processor.claim or ())}):
        raise InvalidOption(
            f"{processor.name}: expected {method}(rows, values={{…}}) where {option}=… is not a "
            f"mapping, with each column of claim, got {', '.join(given) or 'no values'}; pass the "
            "values that take a row out of pending."
        )
    if processor.claim is not None and states.is_timeless(processor):
        raise InvalidOption(
            f"{processor.name}: expected claimed_at=… for {method}(), which tells a handled row "
            "from a claimed one, got a claim without it; set it to a nullable DateTimeField, or "
            "update the rows with Django instead."
        )
    check_columns(given, model, processor.name, "values")
    return {**own, **given}


def _question(processor: Definition[Any], rows: Any, method: str) -> Question[Any]:
    """Return the question on the rows' alias; refuse rows that are not the processor's."""
    question = question_of(processor, getattr(rows, "_db", None))  # .db would ask the router
    ours = isinstance(rows, QuerySet) and rows.model._meta.concrete_model is question.model
    if not ours or rows.query.is_sliced:
        raise InvalidOption(
            f"{processor.name}: expected {method}() to take a queryset of "
            f"{question.model._meta.label} without a slice, got {type(rows).__name__}; for one row "
            "write …objects.filter(pk=…)."
        )
    return question


def act(write: Write) -> int:
    """Write to the rows that meet the needs, and warn of the others; return how many were."""
    choice, written = write.choose(), Written()
    write.to_free(choice.rows, written, seconds=LONGEST)
    for why, pks in {**choice.left, **written.left()}.items():
        logger.warning(
            "%s: %s() left rows as they are, %d of them (%s%s): %s.",
            *(write.processor.name, write.method, len(pks)),
            *(", ".join(map(repr, pks[:SHOWN])), ", …" if len(pks) > SHOWN else "", why),
        )
    return len(written.written)


# --- their one writer

#: A row as it was seen: the columns that processors write, and last, whether it was pending.
Seen = Sequence[Any]


@dataclass(slots=True)
class Choice:
    """The rows that are to be written to, as they were seen, and by reason the keys of others."""

    rows: dict[Any, Seen] = field(default_factory=dict)
    left: dict[str, list[Any]] = field(default_factory=dict)


@dataclass(slots=True)
class Written:
    """The rows by what became of them: written, changed since they were chosen, or locked."""

    written: list[Any] = field(default_factory=list)
    changed: list[Any] = field(default_factory=list)
    locked: list[Any] = field(default_factory=list)

    def left(self) -> dict[str, list[Any]]:
        """Return the keys of the rows that were not written to, by reason."""
        found = {CHANGED: self.changed, LOCKED: self.locked}
        return {why: pks for why, pks in found.items() if pks}


class Write:
    """What an action writes, and to which rows.

    ``rows``: those of the operator; ``method``: that of the processor for the action; ``need``:
    why a row is left, unless by ``force``, and the condition under which it is not.
    """

    def __init__(
        self,
        processor: Definition[Any],
        question: Question[Any],
        rows: QuerySet[Any, Any],
        method: str,
        *,
        need: tuple[str, Q],
        values: Values,
        force: bool,
    ) -> None:
        self.processor, self.method = processor, method
        self._question, self._rows = question, rows.using(question.using)
        lease, age = processor.lease, default_age(processor)
        times = [processor.claimed_at, lease.field if lease else None]
        self._values = {**dict.fromkeys(filter(None, times)), **values}
        # Race: double claim. A row that was put back may have failed since, with as many attempts.
        self._columns = written_columns(processor, question.model)
        # Race: lost lease that writes. A worker that is at work on the row would settle nothing,
        # and another worker would handle the row at the same time.
        self._needs = [("leased by a worker", lease.free())] if lease else []
        if not force:
            # Race: double claim. Under its lock, because a worker may have settled the row
            # meanwhile: a paid charge that is put back is paid twice, and so is one that is being
            # paid now.
            young = f"claimed less than {age:g} s ago: a worker may be at work; use force"
            self._needs += [(young, ~states.is_young(processor, question)), need]

    def choose(self) -> Choice:
        """Read which of the rows meet the needs, and what they are now; locks nothing."""
        choice = Choice()
        for pk, (why, seen) in self._look(self._rows.order_by("pk")).items():
            if why:
                choice.left.setdefault(why, []).append(pk)
            else:
                choice.rows[pk] = seen
        return choice

    def to_free(self, chosen: Mapping[Any, Seen], written: Written, *, seconds: float) -> None:
        """Write to those of the chosen rows that are free, and leave the others.

        Each chunk of rows is a transaction, which passes over rows that other sessions have locked;
        an error of the database rolls it back, and is raised. ``seconds``: the time that all
        statements together may take, for example because the table is locked. ``written`` has what
        is committed, also after an error.
        """
        question, name = self._question, self.processor.name
        isolation.refuse_outer_transaction(question.using, name, f"{self.method}()")
        pks, end = [*chosen], time.monotonic() + seconds
        for some in (pks[at : at + WINDOW] for at in range(0, len(pks), WINDOW)):
            write = steps.Write(self._values, some, asks=self.method != "requeue")
            done: Seen = ()
            free: Seen = ()
            try:
                limit = time_limit(question.using, end - time.monotonic())
                with isolation.read_committed(question.using), limit:
                    session, still = Session(question.using, name), partial(self._still, chosen)
                    done, free = session.change(question, write, still)
            except DatabaseError as error:
                if not (is_contention(error) or is_statement_timeout(error)):
                    raise
                done, free = (), ()  # also those whose COMMIT has failed
            written.written += done
            written.changed += [pk for pk in free if pk not in done]
            written.locked += [pk for pk in some if pk not in free]

    def _still(self, chosen: Mapping[Any, Seen], pks: Sequence[Any]) -> list[Any]:
        """Return those of the rows that meet the needs, and are as they were seen.

        Another operator may have put a row back, so that it is in the same state again. A row that
        was pending has to be so still: of a flip that is a function, no column is known. One that
        was not may be so since, because its time has come.
        """
        now, same = self._look(self._rows.order_by().filter(these(pks))), []
        for pk in pks:
            why, (*found, is_pending) = now.get(pk, (CHANGED, [False]))
            *before, was_pending = chosen[pk]
            if not why and found == before and is_pending >= was_pending:
                same.append(pk)
        return same

    def _look(self, rows: QuerySet[Any, Any]) -> dict[Any, tuple[str, Seen]]:
        """Return why each row is left, empty: it meets all needs; and what it is now."""
        added = {f"dcl_need_{at}": flag(need) for at, (_, need) in enumerate(self._needs)}
        added = {"dcl_pending": flag(is_pending(self._question)), **added}
        size, found = len(self._columns) + 1, {}
        for pk, *read in rows.annotate(**added).values_list("pk", *self._columns, *added):
            are_met = zip(self._needs, read[size:], strict=True)
            why = next((why for (why, _), is_met in are_met if not is_met), "")
            found[pk] = why, read[:size]
        return found
