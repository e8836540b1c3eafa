"""Writes to the rows that an operator chose, if they still are as they were when chosen."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Any

from django.db import DatabaseError, connections, transaction
from django.db.models import Q, QuerySet

from dcl_processor.exceptions import InsideTransaction, ProcessorError, StillPending
from dcl_processor.operator.states import digest, flag, is_pending, is_same, plain
from dcl_processor.operator.time_limit import lock_timeout
from dcl_processor.options.model_columns import written_columns
from dcl_processor.options.options import Definition
from dcl_processor.pending import steady as time
from dcl_processor.pending.question import Question
from dcl_processor.pending.scan import WINDOW
from dcl_processor.report import errors
from dcl_processor.report.errors import shown
from dcl_processor.report.values import Values, constants_of, resolve
from dcl_processor.sql.errors import is_contention, is_passing
from dcl_processor.sql.isolation import in_test_case, read_committed
from dcl_processor.sql.session import lock_database, lock_rows
from dcl_processor.sql.steps import not_written

#: Rows by primary key, each with the digest of what it was when it was chosen.
Chosen = Mapping[Any, str]

#: Why a row is left if it does not meet the condition, and the condition.
Need = tuple[str, Q]

#: Why a row that was chosen is left all the same.
CHANGED, LOCKED = "changed since the choice", "locked by other sessions"

#: Seconds: the least time that a statement may wait for a lock.
LEAST = 0.01

#: The annotations that say whether the row is in ``pending``, and whether it meets each need.
_PENDING, _NEED = "dcl_pending", "dcl_need_"


@dataclass(slots=True)
class Choice:
    """The rows that are to be written to, and by reason the keys of the others, and their number.

    Of the rows that are left there may be fewer keys than rows.
    """

    rows: dict[Any, str] = field(default_factory=dict)
    left: dict[str, list[Any]] = field(default_factory=dict)
    numbers: Counter[str] = field(default_factory=Counter)


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
        processor = self.processor
        self.rows = self.rows.using(self.question.using)
        self.values = {**_unclaimed(processor), **self.values}
        # Race: double claim. A row that was put back may have failed since, with as many attempts.
        self.columns = tuple(written_columns(processor, self.question.model))
        # Race: lost lease that writes. A worker that is at work on the row would settle nothing,
        # and another worker would handle the row at the same time.
        free = processor.lease.free() if processor.lease else Q()
        self.needs = [each for each in (("leased by a worker", free), *self.needs) if each[1]]

    def choose(self, *, most_left: float = math.inf) -> Choice:
        """Read which of the rows meet the needs, and what they are now; locks nothing.

        ``most_left``: the keys that are kept of the rows that are left for one reason.
        """
        using, choice = self.question.using, Choice()
        # The driver gets so many rows at a time from a cursor of the server. A pool may give the
        # statements after its transaction to another session. SQLite has none, and might lock.
        has_cursor = connections[using].features.has_select_for_update
        with settlement_transaction(using) if has_cursor else nullcontext():
            read = self._read(self.rows.order_by("pk")).iterator(chunk_size=WINDOW)
            # A join may repeat a row.
            for pk, (marks, *_) in groupby(read, itemgetter(0)):
                why = self._unmet(marks)
                if why is None:
                    choice.rows[pk] = self._digest(marks)
                    continue
                choice.numbers[why] += 1
                if choice.numbers[why] <= most_left:
                    choice.left.setdefault(why, []).append(pk)
        return choice

    def to_free(self, chosen: Chosen, written: Written, *, seconds: float) -> None:
        """Write to those of the chosen rows that are free, and leave the others.

        Each chunk of rows is a transaction, which passes over rows that other sessions have locked.
        ``seconds``: the time for which all of them may wait for another lock, such as one of the
        table. ``written`` has what is committed, also after an error.
        """
        question, pks = self.question, [*chosen]
        refuse_old_snapshot(question.using, self.processor.name, own_table=question.own_table)
        end = time.monotonic() + seconds
        for at in range(0, len(pks), WINDOW):
            self._try(chosen, pks[at : at + WINDOW], written, end)

    def _try(self, chosen: Chosen, some: Sequence[Any], written: Written, end: float) -> None:
        """Write to those of the rows that can be locked now; ``end``: until when it may wait."""
        using, seconds = self.question.using, max(LEAST, end - time.monotonic())
        try:
            with settlement_transaction(using), lock_timeout(using, seconds, waits_alone=True):
                free = lock_free(self.question, some)
                done = self._compare_and_write(chosen, free)
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

    def _compare_and_write(self, chosen: Chosen, some: Sequence[Any]) -> list[Any]:
        """Write to those of the locked rows that are as they were chosen, and return their keys."""
        if not some:
            return []
        # Race: double claim. A worker may have claimed or settled a row since it was chosen, and
        # another operator may have put it back, so that it is in the same state again.
        read = self._read(self.rows.order_by().filter(pk__in=some))
        found = {row[0]: self._digest(row) for row in read if self._unmet(row) is None}
        same = [pk for pk in some if pk in found and is_same(chosen[pk], found[pk])]
        if same:
            self._update(same, self.values)
        if same and not self.is_checked:
            self._refuse_unsettled(same)
        return same

    def _update(self, pks: Sequence[Any], values: Values) -> None:
        rows = self.question.table
        written = 0
        for some in [[pk] for pk in pks] if any(map(callable, values.values())) else [pks]:
            written += rows.filter(pk__in=some).update(**resolve(values))
        if written < len(pks):
            raise not_written(self.processor.name, pks)

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

    def _read(self, rows: QuerySet[Any, Any]) -> QuerySet[Any, Any]:
        """Return the read of the keys, the marks and the needs, which is not executed."""
        added: dict[str, Any] = {_PENDING: flag(is_pending(self.question))}
        added |= {f"{_NEED}{at}": flag(need) for at, (_, need) in enumerate(self.needs)}
        read: QuerySet[Any, Any] = rows.annotate(**added).values_list("pk", *self.columns, *added)
        return read

    def _unmet(self, row: Sequence[Any]) -> str | None:
        """Return why the row is left; ``None``: it meets all needs."""
        met = zip(self.needs, row[len(row) - len(self.needs) :], strict=True)
        return next((why for (why, _), is_met in met if not is_met), None)

    def _digest(self, row: Sequence[Any]) -> str:
        """Return the digest of a row's marks: the columns, and whether it is pending."""
        _, *columns, is_pending = row[: len(row) - len(self.needs)]
        fields = map(self.question.model._meta.get_field, self.columns)
        return digest([*map(plain, fields, columns)], is_pending=is_pending)


def _unclaimed(processor: Definition[Any]) -> dict[str, Any]:
    lease = {processor.lease.field: None} if processor.lease else {}
    return {**({processor.claimed_at: None} if processor.claimed_at else {}), **lease}


def lock_free(question: Question[Any], pks: Sequence[Any]) -> list[Any]:
    """Lock those of the rows that no other session has locked, and return their keys."""
    if not connections[question.using].features.has_select_for_update:
        lock_database(question)
        return [*pks]
    return lock_rows(question, pks)


def settlement_transaction(using: str) -> Any:
    """Open a transaction at READ COMMITTED, or a savepoint if a transaction is open."""
    inside = connections[using].in_atomic_block
    return transaction.atomic(using=using) if inside else read_committed(using)


def refuse_old_snapshot(using: str, label: str, *, own_table: bool) -> None:
    """Raise inside a transaction whose reads do not see what others have committed since it began.

    ``own_table``: the question reads no other table, so that on PostgreSQL the lock fails for a row
    that was changed since.
    """
    connection: Any = connections[using]
    sees_old = connection.vendor == "mysql" or (connection.vendor == "postgresql" and not own_table)
    if not sees_old or not connection.in_atomic_block or in_test_case(connection):
        return
    # Race: stale second check. A worker may have settled the row since the snapshot.
    with connection.cursor() as cursor:
        is_mysql = connection.vendor == "mysql"
        cursor.execute(
            "SELECT @@transaction_isolation" if is_mysql else "SHOW transaction_isolation"
        )
        level = str(cursor.fetchone()[0]).upper().replace("-", " ")
    if level != "READ COMMITTED":
        raise InsideTransaction(
            f"{label}: expected a transaction at READ COMMITTED around requeue(), mark_done() and "
            "discard(), in which they see what workers have committed, got one inside "
            f"transaction.atomic() at {level} on {using!r}; call them after the block, or set "
            "isolation_level to 'read committed' in OPTIONS."
        )
