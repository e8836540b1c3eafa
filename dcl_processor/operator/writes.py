"""Writes to the rows that an operator chose, if they still are as they were when chosen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from django.db import DatabaseError, connections, transaction
from django.db.models import Q, QuerySet

from dcl_processor.exceptions import ProcessorError, StillPending
from dcl_processor.operator.states import flag, is_pending
from dcl_processor.operator.time_limit import lock_timeout
from dcl_processor.options.model_columns import written_columns
from dcl_processor.options.options import Definition
from dcl_processor.pending import steady as time
from dcl_processor.pending.question import Question, these
from dcl_processor.pending.scan import WINDOW
from dcl_processor.report import errors
from dcl_processor.report.errors import shown
from dcl_processor.report.values import Values, constants_of
from dcl_processor.sql import isolation, steps
from dcl_processor.sql.errors import is_contention, is_passing
from dcl_processor.sql.session import Session

#: Why a row is left if it does not meet the condition, and the condition.
Need = tuple[str, Q]

#: Why a row that was chosen is left all the same.
CHANGED, LOCKED = "changed since the choice", "locked by other sessions"

#: Seconds: the least time that a statement may wait for a lock.
LEAST = 0.01

#: The annotations that say whether the row is in ``pending``, and whether it meets each need.
_PENDING, _NEED = "dcl_pending", "dcl_need_"

#: A row as it was seen: the columns that processors write, and whether it was pending.
Seen = tuple[Sequence[Any], bool]


@dataclass(slots=True)
class Choice:
    """The rows that are to be written to, as they were seen, and by reason the keys of others."""

    rows: dict[Any, Seen] = field(default_factory=dict)
    left: dict[str, list[Any]] = field(default_factory=dict)


@dataclass(slots=True)
class Written:
    """The rows by what became of them: written, changed since they were chosen, or locked.

    ``failed``: the errors by which the database refused the values for a row.
    """

    written: list[Any] = field(default_factory=list)
    changed: list[Any] = field(default_factory=list)
    locked: list[Any] = field(default_factory=list)
    failed: dict[Any, Exception] = field(default_factory=dict)

    def left(self) -> dict[str, list[Any]]:
        """Return the keys of the rows that were not written to, by reason."""
        found = {CHANGED: self.changed, LOCKED: self.locked}
        for pk, error in self.failed.items():
            why = f"the database reported: {shown(errors.text(error), 300)}"
            found.setdefault(why, []).append(pk)
        return {why: pks for why, pks in found.items() if pks}


@dataclass(slots=True)
class Write:
    """What an action writes, and to which rows.

    ``rows``: those of the operator; ``needs``: what a row has to meet besides being free of a
    worker's lease; ``method``: that of the processor for the action; ``is_checked``: whether a
    check of the project has compared the values with ``pending``. ``columns``: those that each
    claim and each settlement writes.
    """

    processor: Definition[Any]
    question: Question[Any]
    rows: QuerySet[Any, Any]
    method: str
    needs: Sequence[Need]
    values: Values
    is_checked: bool = True
    columns: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        processor, lease = self.processor, self.processor.lease
        self.rows = self.rows.using(self.question.using)
        times = [processor.claimed_at, lease.field if lease else None]
        self.values = {**dict.fromkeys(filter(None, times)), **self.values}
        # Race: double claim. A row that was put back may have failed since, with as many attempts.
        self.columns = tuple(written_columns(processor, self.question.model))
        # Race: lost lease that writes. A worker that is at work on the row would settle nothing,
        # and another worker would handle the row at the same time.
        free = lease.free() if lease else Q()
        self.needs = [each for each in (("leased by a worker", free), *self.needs) if each[1]]

    def choose(self) -> Choice:
        """Read which of the rows meet the needs, and what they are now; locks nothing."""
        choice = Choice()
        for pk, (why, seen) in self._look(self.rows.order_by("pk")).items():
            if why is None:
                choice.rows[pk] = seen
            else:
                choice.left.setdefault(why, []).append(pk)
        return choice

    def to_free(self, chosen: Mapping[Any, Seen], written: Written, *, seconds: float) -> None:
        """Write to those of the chosen rows that are free, and leave the others.

        Each chunk of rows is a transaction, which passes over rows that other sessions have locked.
        ``seconds``: the time for which all of them may wait for another lock, such as one of the
        table. ``written`` has what is committed, also after an error.
        """
        # Race: stale second check. A worker may have settled the row since an older snapshot.
        isolation.refuse_old_snapshot(self.question.using, self.processor.name)
        pks, end = [*chosen], time.monotonic() + seconds
        for at in range(0, len(pks), WINDOW):
            self._try(chosen, pks[at : at + WINDOW], written, end)

    def _try(
        self, chosen: Mapping[Any, Seen], some: Sequence[Any], written: Written, end: float
    ) -> None:
        """Write to those of the rows that can be locked now; ``end``: until when it may wait."""
        seconds = max(LEAST, end - time.monotonic())
        try:
            done, free = self._write(some, partial(self._still, chosen), seconds)
        except (DatabaseError, ProcessorError) as error:
            is_locked = is_contention(error)
            if is_passing(error) and not is_locked:
                raise
            if is_locked and (len(some) == 1 or time.monotonic() >= end):
                written.locked += some
            elif len(some) == 1:
                written.failed[some[0]] = error
            else:
                # Another row of the chunk may have been to blame.
                for pk in some:
                    self._try(chosen, [pk], written, end)
            return
        # The transaction is committed.
        written.written += done
        written.changed += [pk for pk in free if pk not in done]
        left = [pk for pk in some if pk not in free]
        there = {*self.question.table.filter(pk__in=left).values_list("pk", flat=True)}
        for pk in left:
            (written.locked if pk in there else written.changed).append(pk)

    def _write(
        self, some: Sequence[Any], still: Any, seconds: float
    ) -> tuple[Sequence[Any], Sequence[Any]]:
        using, question = self.question.using, self.question
        inside = connections[using].in_atomic_block
        opened = transaction.atomic(using=using) if inside else isolation.read_committed(using)
        with opened, lock_timeout(using, seconds, waits_alone=True):
            session = Session(using, self.processor.name)
            done, free = session.change(question, steps.Write(self.values, some), still)
            if done and not self.is_checked:
                self._refuse_unsettled(done)
        return done, free

    def _still(self, chosen: Mapping[Any, Seen], pks: Sequence[Any]) -> list[Any]:
        """Return those of the rows that are in the state, and as they were seen.

        Another operator may have put a row back, so that it is in the same state again. A row that
        was pending has to be so still: of a flip that is a function, no column is known. One that
        was not may be so since, because its time has come.
        """
        now = self._look(self.rows.order_by().filter(these(pks)))
        same = []
        for pk in pks:
            columns, was_pending = chosen[pk]
            why, (found, is_pending) = now.get(pk, ("", ((), False)))
            if why is None and found == columns and is_pending >= was_pending:
                same.append(pk)
        return same

    def _refuse_unsettled(self, pks: Sequence[Any]) -> None:
        """Raise for a written row that is pending, or that is claimed and nothing besides."""
        processor = self.processor
        # A claim without a lease alone keeps its row out of pending.
        claim = {} if processor.lease else constants_of(processor.claim or {})
        held = self.question.table.filter(pk__in=pks if claim else [], **claim)
        done = processor.done if processor._has_fixed_flip else None
        for settled in filter(None, (done, processor.failed)):
            held = held.exclude(**constants_of(settled))
        pending = self.question.still_pending(pks).using(self.question.using)
        for found, state in ((pending, "is pending"), (held, "is still claimed")):
            for pk in found.order_by().values_list("pk", flat=True)[:1]:
                raise StillPending(
                    f"{processor.name}: expected {self.method}()'s values to settle each row, got "
                    f"values for {', '.join(self.values)}, with which row {pk} {state}; name the "
                    "columns that take a row out of pending as well."
                )

    def _look(self, rows: QuerySet[Any, Any]) -> dict[Any, tuple[str | None, Seen]]:
        """Return why each row is left, ``None``: it meets all needs; and what it is now."""
        added: dict[str, Any] = {_PENDING: flag(is_pending(self.question))}
        added |= {f"{_NEED}{at}": flag(need) for at, (_, need) in enumerate(self.needs)}
        return {row[0]: self._seen(row) for row in self._read(rows, added)}

    def _read(self, rows: QuerySet[Any, Any], added: Mapping[str, Any]) -> Iterator[Sequence[Any]]:
        yield from rows.annotate(**added).values_list("pk", *self.columns, *added)

    def _seen(self, row: Sequence[Any]) -> tuple[str | None, Seen]:
        size = 1 + len(self.columns)
        columns, is_pending, are_met = row[1:size], row[size], row[size + 1 :]
        why = (why for (why, _), is_met in zip(self.needs, are_met, strict=True) if not is_met)
        return next(why, None), (columns, is_pending)
