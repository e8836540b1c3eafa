"""Writes to the rows that an operator chose, if they still are as they were when chosen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from django.db import DatabaseError, connections, transaction
from django.db.models import Q, QuerySet

from dcl_processor.exceptions import ProcessorError, StillPending
from dcl_processor.operator.states import flag, is_pending
from dcl_processor.operator.time_limit import time_limit
from dcl_processor.options.model_columns import written_columns
from dcl_processor.options.options import Definition
from dcl_processor.pending import steady as time
from dcl_processor.pending.question import Question, these
from dcl_processor.pending.scan import WINDOW
from dcl_processor.report import errors
from dcl_processor.report.errors import shown
from dcl_processor.report.values import Values
from dcl_processor.sql import isolation, steps
from dcl_processor.sql.errors import is_contention, is_passing, is_statement_timeout
from dcl_processor.sql.session import Session

#: Why a row is left if it does not meet the condition, and the condition.
Need = tuple[str, Q]

#: Why a row that was chosen is left all the same.
CHANGED, LOCKED = "changed since the choice", "locked by other sessions, or deleted"

#: Seconds: the least time that a statement gets.
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
    worker's lease; ``method``: that of the processor for the action. ``columns``: those that each
    claim and each settlement writes.
    """

    processor: Definition[Any]
    question: Question[Any]
    rows: QuerySet[Any, Any]
    method: str
    needs: Sequence[Need]
    values: Values
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
        ``seconds``: the time that all statements together may take, for example because the table
        is locked; inside a transaction of the caller's they have no limit. ``written`` has what is
        committed, also after an error.
        """
        # Race: stale second check. A worker may have settled the row since an older snapshot.
        isolation.refuse_old_snapshot(self.question.using, self.processor.name)
        pks, end = [*chosen], time.monotonic() + seconds
        for at in range(0, len(pks), WINDOW):
            self._try(chosen, pks[at : at + WINDOW], written, end)

    def _try(
        self, chosen: Mapping[Any, Seen], some: Sequence[Any], written: Written, end: float
    ) -> None:
        """Write to those of the rows that can be locked now; ``end``: until when it may take."""
        try:
            with self._transaction(max(LEAST, end - time.monotonic())):
                done, free = self._write(chosen, some)
        except (DatabaseError, ProcessorError) as error:
            if is_contention(error) or is_statement_timeout(error):
                written.locked += some
            elif is_passing(error):
                raise
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
        written.locked += [pk for pk in some if pk not in free]

    @contextmanager
    def _transaction(self, seconds: float) -> Iterator[None]:
        using = self.question.using
        if connections[using].in_atomic_block:
            with transaction.atomic(using=using):
                yield
        else:
            with isolation.read_committed(using), time_limit(using, seconds):
                yield

    def _write(
        self, chosen: Mapping[Any, Seen], some: Sequence[Any]
    ) -> tuple[Sequence[Any], Sequence[Any]]:
        session = Session(self.question.using, self.processor.name)
        still = partial(self._still, chosen)
        done, free = session.change(self.question, steps.Write(self.values, some), still)
        if done and self.method != "requeue":
            self._refuse_pending(done)
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

    def _refuse_pending(self, pks: Sequence[Any]) -> None:
        """Raise for a written row that is still pending."""
        pending = self.question.still_pending(pks).using(self.question.using)
        for pk in pending.values_list("pk", flat=True)[:1]:
            raise StillPending(
                f"{self.processor.name}: expected {self.method}()'s values to settle each row, got "
                f"values for {', '.join(self.values)}, with which row {pk} is pending; name the "
                "columns that take a row out of pending as well."
            )

    def _look(self, rows: QuerySet[Any, Any]) -> dict[Any, tuple[str | None, Seen]]:
        """Return why each row is left, ``None``: it meets all needs; and what it is now."""
        added: dict[str, Any] = {_PENDING: flag(is_pending(self.question))}
        added |= {f"{_NEED}{at}": flag(need) for at, (_, need) in enumerate(self.needs)}
        size, found = 1 + len(self.columns), {}
        for row in rows.annotate(**added).values_list("pk", *self.columns, *added):
            are_met = zip(self.needs, row[size + 1 :], strict=True)
            why = next((why for (why, _), is_met in are_met if not is_met), None)
            found[row[0]] = why, (row[1:size], row[size])
        return found
