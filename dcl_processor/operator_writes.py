"""Writes to the rows that an operator chose, if they still are as they were when chosen."""

from __future__ import annotations

import math
from base64 import urlsafe_b64encode
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from django.db import DatabaseError, connections, transaction
from django.db.models import BooleanField, Case, Q, QuerySet, Value, When
from django.db.models.functions import Substr

from dcl_processor import steady as time

from .candidates.question import Question
from .candidates.scan import WINDOW
from .database.contention import is_about_rows, is_contention
from .database.time_limit import lock_timeout
from .exceptions import StillPending
from .locking.isolation import refuse_old_snapshot
from .locking.row_locks import lock_free, settlement_transaction, written_parts
from .operator_states import is_pending, settled_constants
from .settlement.writing import NotWritten, not_written
from .values import Values, constants_of, resolve

if TYPE_CHECKING:
    from .definition.definition import Definition

#: Rows by primary key, each with the digest of what it was when it was chosen.
Chosen = Mapping[Any, str]

#: Keys that are shown of rows that an action leaves.
SHOWN = 5

#: Seconds between two tries to lock the rows that other sessions have locked.
PAUSE = 0.1

#: Seconds: the least time that a statement may wait for a lock.
LEAST = 0.01

#: The annotations that say whether a row is in ``pending``, and how its last error begins.
_PENDING, _ERROR = "dcl_pending", "dcl_error"

#: Characters of an error that are compared: as many as the admin shows.
_SEEN = 300


@dataclass(slots=True)
class Written:
    """The rows by what became of them: written, changed since they were chosen, or locked.

    ``failed``: the errors by which the database refused the values for a row.
    """

    written: list[Any] = field(default_factory=list)
    changed: list[Any] = field(default_factory=list)
    locked: list[Any] = field(default_factory=list)
    failed: dict[Any, Exception] = field(default_factory=dict)


@dataclass(slots=True)
class Write:
    """What an action writes, and to which rows.

    ``rows``: those of the operator; ``condition``: what a row has to meet besides being free;
    ``unchecked``: the method whose values nothing else has checked. ``free``: that no worker holds
    the row by a lease; ``columns``: those that each claim and each settlement writes; ``error``:
    that of the last error, if they are not enough.
    """

    processor: Definition[Any]
    question: Question[Any]
    rows: QuerySet[Any, Any]
    condition: Q
    values: Values
    unchecked: str = ""
    free: Q = field(init=False)
    columns: tuple[str, ...] = field(init=False)
    error: str | None = field(init=False)

    def __post_init__(self) -> None:
        processor = self.processor
        self.rows = self.rows.using(self.question.using)
        self.values = {**_unclaimed(processor), **self.values}
        self.columns = tuple(dict.fromkeys(_columns(processor)))
        error = processor.retry.last_error if processor.retry else None
        self.error = None if error in self.columns else error
        # Race: lost lease that writes. A worker that is at work on the row would settle nothing,
        # and another worker would handle the row at the same time.
        self.free = processor.lease.free() if processor.lease else Q()

    def choose(self, *, among: Container[Any] | None = None) -> Chosen:
        """Read which of the rows meet the condition, and what they are now; locks nothing.

        ``among``: keys; other rows are left out.
        """
        using = self.question.using
        # The driver gets so many rows at a time from a cursor of the server. A pool may give the
        # statements after its transaction to another session. SQLite has none, and might lock.
        has_cursor = connections[using].features.has_select_for_update
        with settlement_transaction(using) if has_cursor else nullcontext():
            rows = self._marks(self.rows.order_by("pk")).iterator(chunk_size=WINDOW)
            return {pk: self._digest(marks) for pk, *marks in rows if among is None or pk in among}

    def others(self) -> tuple[int, list[Any]]:
        """Return how many of the rows do not meet the condition, and the keys of some of them."""
        met = self.rows.filter(self.free, self.condition).order_by().values("pk")
        others = (
            self.rows.exclude(pk__in=met).order_by("pk").values_list("pk", flat=True).distinct()
        )
        return others.count(), [*others[:SHOWN]]

    def to_free(
        self, chosen: Chosen, written: Written, *, seconds: float, stop_at: float = math.inf
    ) -> None:
        """Write to the chosen rows, and give up on rows that stay locked for so many seconds.

        Each chunk of rows is a transaction, which does not wait for rows that other sessions have
        locked. So the action itself holds no lock while it waits for one. Each row is tried once,
        however long that takes, unless the database has one lock for all of them. ``written`` has
        what is committed, also after an error. ``stop_at``: when ``time.monotonic()`` is there, no
        other row is tried after the first try; ``written`` has none of the rows not tried.
        """
        self._refuse_old_snapshot()
        end = min(time.monotonic() + seconds, stop_at)
        has_row_locks = connections[self.question.using].features.has_select_for_update
        locked = list[Any]()
        for some in _chunks([*chosen], WINDOW):
            left = end - time.monotonic()
            if locked and left <= 0 and not has_row_locks:
                locked += some  # all rows have the same lock
            else:
                locked += self._try(chosen, some, written, max(LEAST, left), stop_at)
            if time.monotonic() >= stop_at:
                break
        while locked and time.monotonic() < end:
            time.sleep(PAUSE)
            waiting, locked = locked, []
            # One by one, because one row that is locked may have held up all of its chunk.
            for pk in waiting:
                left = end - time.monotonic()
                limit = max(LEAST, left)
                locked += self._try(chosen, [pk], written, limit, stop_at) if left > 0 else [pk]
        written.locked += locked

    def _refuse_old_snapshot(self) -> None:
        question = self.question
        refuse_old_snapshot(question.using, self.processor.name, own_table=question.own_table)

    def _try(
        self, chosen: Chosen, some: Sequence[Any], written: Written, seconds: float, stop_at: float
    ) -> Sequence[Any]:
        """Write to those of the rows that can be locked now, and return those that cannot."""
        using = self.question.using
        try:
            with settlement_transaction(using), lock_timeout(using, seconds, waits_alone=True):
                tables = written_parts(self.question.model, self.values)
                free = lock_free(self.question, some, tables)
                done = self._compare_and_write(chosen, free)
        except (DatabaseError, NotWritten) as error:
            # A lock of the whole table, for instance, is not passed over.
            if is_contention(error):
                return some
            if not (isinstance(error, NotWritten) or is_about_rows(error)):
                raise
            if len(some) == 1:
                written.failed[some[0]] = error
                return []
            # The values may suit the other rows of the chunk.
            again = list[Any]()
            for pk in some:
                again += self._try(chosen, [pk], written, seconds, stop_at)
                if time.monotonic() >= stop_at:
                    break
            return again
        # The transaction is committed.
        written.written += done
        written.changed += [pk for pk in free if pk not in done]
        left = [pk for pk in some if pk not in free]
        there = {*self.question.table.filter(pk__in=left).values_list("pk", flat=True)}
        written.changed += [pk for pk in left if pk not in there]
        return [pk for pk in left if pk in there]

    def _compare_and_write(self, chosen: Chosen, some: Sequence[Any]) -> list[Any]:
        """Write to those of the locked rows that are as they were chosen, and return their keys."""
        if not some:
            return []
        # Race: double claim. A worker may have claimed or settled a row since it was chosen, and
        # another operator may have put it back, so that it is in the same state again.
        rows = self._marks(self.rows.order_by().filter(pk__in=some))
        found = {pk: self._digest(marks) for pk, *marks in rows}
        same = [pk for pk in some if pk in found and is_same(chosen[pk], found[pk])]
        if same and self.unchecked:
            self._rehearse(same)
        if same:
            self._update(same, self.values)
        if same and self.unchecked:
            self._refuse_unsettled(same)
        return same

    def _update(self, pks: Sequence[Any], values: Values) -> None:
        rows = self.question.table
        written = 0
        for some in [[pk] for pk in pks] if any(map(callable, values.values())) else [pks]:
            written += rows.filter(pk__in=some).update(**resolve(values))
        if written < len(pks):
            raise not_written(self.processor.name, pks)

    @property
    def _claim(self) -> Mapping[str, Any]:
        """The constants of a claim without a lease: it alone keeps its row out of ``pending``."""
        return {} if self.processor.lease else constants_of(self.processor.claim or {})

    def _rehearse(self, pks: Sequence[Any]) -> None:
        """Raise if only the claim would keep a row out of ``pending``, and undo the attempt."""
        reset = self.processor.reset
        if not self._claim or reset is None:
            return
        using = self.question.using
        with transaction.atomic(using=using):
            self._update(pks, {**reset, **self.values})
            pending = self._first(self._pending_of(pks))
            transaction.set_rollback(True, using=using)
        for pk in pending:
            raise self._still_pending(pk, "is out of pending by its claim alone")

    def _refuse_unsettled(self, pks: Sequence[Any]) -> None:
        """Raise for a written row that is pending, or that is claimed and nothing besides."""
        for pk in self._first(self._pending_of(pks)):
            raise self._still_pending(pk, "is pending")
        if not self._claim or self.processor.reset is not None:
            return
        held = self.question.table.filter(pk__in=pks, **self._claim)
        for constants in settled_constants(self.processor):
            held = held.exclude(**constants)
        for pk in self._first(held):
            raise self._still_pending(pk, "is still claimed")

    def _still_pending(self, pk: Any, state: str) -> StillPending:
        return StillPending(
            f"{self.processor.name}: expected {self.unchecked}()'s values to settle each row, got "
            f"values for {', '.join(self.values)}, with which row {pk} {state}; name the columns "
            "that take a row out of pending as well."
        )

    def _pending_of(self, pks: Sequence[Any]) -> QuerySet[Any, Any]:
        return self.question.still_pending(pks).using(self.question.using)

    def _first(self, rows: QuerySet[Any, Any]) -> list[Any]:
        return [*rows.order_by().values_list("pk", flat=True)[:1]]

    def _digest(self, marks: Sequence[Any]) -> str:
        """Return the digest of a row's marks: the columns, the error, and whether it is pending."""
        fields = map(self.question.model._meta.get_field, self.columns)
        columns = [plain(*each) for each in zip(fields, marks, strict=False)]
        *error, pending = marks[len(columns) :]
        return digest([*columns, *error], is_pending=pending)

    def _marks(self, rows: QuerySet[Any, Any]) -> QuerySet[Any, Any]:
        """Return the read of the keys and the marks, which is not executed."""
        pending = is_pending(self.question)
        read = rows.filter(self.free, self.condition).annotate(
            **{
                _PENDING: Case(
                    When(pending, then=Value(True)),
                    default=Value(False),
                    output_field=BooleanField(),
                )
            }
        )
        seen = [] if self.error is None else [_ERROR]
        if self.error is not None:
            read = read.annotate(**{_ERROR: Substr(self.error, 1, _SEEN)})
        marks: QuerySet[Any, Any] = read.values_list("pk", *self.columns, *seen, _PENDING)
        return marks


def _chunks(pks: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (pks[at : at + size] for at in range(0, len(pks), size))


def _columns(processor: Definition[Any]) -> Iterator[str]:
    """Yield the columns that show that a row was claimed or settled, which are kept for each row.

    An error may be a long text. No worker writes it without counting the attempt, or setting the
    time of the next one, if there is a column for it; its beginning is compared besides.
    """
    # Race: double claim. A row that was put back may have failed since, with as many attempts.
    noted = processor.retry.on_failure if processor.retry else None
    for values in (processor.claim, processor.done, processor.failed, noted):
        yield from values or ()
    if processor.claimed_at is not None:
        yield processor.claimed_at
    if processor.lease is not None:
        yield processor.lease.field
    if (retry := processor.retry) is not None:
        counted = [*filter(None, (retry.attempts, retry.next_attempt_at))]
        yield from counted or retry.columns


def _unclaimed(processor: Definition[Any]) -> dict[str, Any]:
    lease = {processor.lease.field: None} if processor.lease else {}
    return {**({processor.claimed_at: None} if processor.claimed_at else {}), **lease}


# --- the rows that an operator chose, each with a short text by which a change of it is noticed


#: Bytes of a digest, which are 8 characters, and what follows if the row was pending.
_DIGEST, _WAS_PENDING = 6, "+"


def digest(marks: Sequence[Any], *, is_pending: bool) -> str:
    """Return a text for the texts of columns, the same in each process while they are the same."""
    known = repr(marks).encode("utf-8", "surrogatepass")
    short = urlsafe_b64encode(blake2b(known, digest_size=_DIGEST).digest()).decode()
    return short + (_WAS_PENDING if is_pending else "")


def is_same(before: str, now: str) -> bool:
    """Return whether a row with these two digests is as it was.

    A row that was pending has to be pending still: of a flip that is a function, no column is
    known. A row that was not may be so since, because its time has come.
    """
    return now in (before, before + _WAS_PENDING)


#: In the text of an object that has none of its own, and whose address differs in each process.
_ADDRESS = " at 0x"


def plain(field: Any, value: Any) -> str | None:
    """Return a column's value as a text that is the same in each process; ``None`` without one."""
    if value is None or isinstance(value, str):
        return value
    row = SimpleNamespace(**{field.attname: value})
    # As it is serialised first: what is for the database may be encrypted, each time otherwise.
    for form, given in ((field.value_to_string, row), (field.get_prep_value, value)):
        # A field of the user's own may refuse in any way.
        with suppress(Exception):
            if _ADDRESS not in (text := repr(form(given))):
                return text
    return None
