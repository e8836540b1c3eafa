"""The heartbeat, which renews the leases of one worker while its handlers run."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any

from django.db import OperationalError, connections
from django.db.models import Field

from dcl_processor import clock, log_fields
from dcl_processor import steady as time
from dcl_processor.candidates.question import Question, these
from dcl_processor.database.time_limit import lock_timeout
from dcl_processor.definition.kinds import Lease
from dcl_processor.execution.calls import CallLimits, abandoned
from dcl_processor.execution.time_limit import TimeLimit
from dcl_processor.locking.isolation import ReadCommitted
from dcl_processor.locking.row_locks import lock_free, lock_rows, settlement_transaction
from dcl_processor.settlement.writing import Expected, compare_and_set_all
from dcl_processor.values import Values

logger = logging.getLogger("dcl_processor")

#: Seconds that a renewal, and so the end of a run, waits for a lock at a time.
LONGEST_WAIT = 5.0

#: Seconds that the end of a run waits for the heartbeat. A heartbeat that still runs after that
#: waits for a connection of the pool. It has no lease to renew, and ends when the pool returns a
#: connection or a timeout.
CLOSING = 2 * LONGEST_WAIT

#: Of the tokens that this worker has written to a row, so many of the first and of the last are
#: known: a statement names them all.
KEPT = 10


class Heartbeat:
    """Renews the leases of one worker, in a thread and on a connection of its own.

    ``limits``: of the handlers, if there are any.

    The lock guards the data in memory and is never held during a query, so a settlement waits for
    no renewal. The two may come in either order, because a renewal records its token before it is
    sent, and recognises the row by the lease token.
    """

    def __init__(self, lease: Lease, label: str, limits: CallLimits | None = None) -> None:
        self._lease = lease
        self._seconds = lease.seconds
        self._label = label
        self._limits = limits
        self._claims: dict[Any, frozenset[Any]] = {}
        self._lock = threading.Lock()
        self._question: Question[Any] | None = None
        self._tokens: dict[Any, list[datetime]] = {}
        self._alive_until: dict[Any, float] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        #: The column of the lease, and the model whose table it is in.
        self._field: Any = None
        self._owner: Any = None

    def hold(self, question: Question[Any], claimed: Mapping[Any, Values], since: float) -> None:
        """Begin to renew the leases of these rows, whose claim has been committed.

        ``claimed``: the columns that the claim wrote, by row, with the lease token among them.
        ``since``: when the claim began, by this process's monotonic clock.
        """
        if not claimed:
            return
        with self._lock:
            self._question = question
            together = frozenset(claimed)
            for pk, columns in claimed.items():
                self._claims[pk] = together
                self._tokens[pk] = [columns[self._lease.field]]
                self._alive_until[pk] = since + self._seconds
            # One heartbeat for all threads of the worker. Inside Django's TestCase nothing is
            # committed, and no other connection sees the rows.
            if self._thread is None and not connections[question.using].in_atomic_block:
                field: Any = question.model._meta.get_field(self._lease.field)
                self._owner, self._field = field.model, field
                leave_alone(field, self._has)
                name = f"{self._label}: leases"
                self._thread = threading.Thread(target=self._keep, name=name, daemon=True)
                self._thread.start()

    def is_ours(self, pk: Any) -> bool:
        """Return whether the lease is alive, as far as this process knows."""
        with self._lock:
            return time.monotonic() < self._alive_until.get(pk, 0.0)

    def end_of(self, pk: Any) -> float:
        """Return when the lease lapses unless it is renewed, by this process's monotonic clock."""
        with self._lock:
            return self._alive_until.get(pk, 0.0)

    def _has(self, instance: Any) -> bool:
        """Return whether this worker holds the row of an instance."""
        with self._lock:
            question = self._question
            if question is None or not isinstance(instance, self._owner):
                return False
            is_here = instance._state.db == question.using  # noqa: SLF001  # Django documents it
            return is_here and instance.pk in self._tokens

    def let_go(self, pk: Any, claimed: Values) -> Expected:
        """Stop renewing a row's lease, and return the tokens that recognise it.

        These are the tokens that this worker wrote, of which the first and the last are kept
        (``KEPT``): a renewal may come between the end of the handler and the settlement, and its
        answer may be lost. ``claimed``: the columns that the claim wrote, whose token is the only
        one if the lease was not held yet.
        """
        with self._lock:
            field = self._lease.field
            self._alive_until.pop(pk, None)
            self._claims.pop(pk, None)
            return {field: self._tokens.pop(pk, [claimed[field]])}

    def close(self) -> None:
        """End the thread; leases that are still held lapse."""
        self._stop.set()
        if self._field is not None:
            write_again(self._field, self._has)
        # A thread whose start was interrupted cannot be joined; the event ends it, too.
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(CLOSING)

    def _keep(self) -> None:
        pause = self._seconds / 3
        try:
            while not self._stop.wait(pause):
                # After a failed beat there is time for several more before the lease lapses.
                pause = self._seconds / (3 if self._beat() else 12)
        finally:
            connections.close_all()

    def _beat(self) -> bool:
        """Renew the leases; return whether all of them were renewed."""
        try:
            question, locked = self._renew()
            if question is not None and locked:
                self._wait_for(question, locked)
                return False
        except Exception as error:  # noqa: BLE001
            # The next beat tries again; the lease may have lapsed by then.
            message = "%s: the heartbeat did not renew the leases: %s"
            extra = log_fields.fields(self._label, **log_fields.error_fields(error))
            log_fields.log(logger, logging.WARNING, message, self._label, error, extra=extra)
            for connection in connections.all(initialized_only=True):
                connection.close_if_unusable_or_obsolete()
            return False
        return True

    def _renew(self) -> tuple[Question[Any] | None, list[Any]]:
        """Renew the leases of the rows that are not locked, and return the locked ones."""
        # A handler that cannot be interrupted does not keep its row: the lease lapses, and
        # another worker takes the row over.
        given_up = abandoned(self._limits) if self._limits is not None else set()
        with self._lock:
            question = self._question
            held = [pk for pk in self._tokens if pk not in given_up]
            if given_up and isinstance(self._limits, TimeLimit):
                # The other rows of its claim wait for the same thread.
                held = [pk for pk in held if not given_up & self._claims.get(pk, frozenset())]
        if question is None or not held:
            return None, []
        began = time.monotonic()
        now = clock.read(question.table, held)
        if now is None:
            return None, []  # the handlers deleted their rows
        token = now + timedelta(seconds=self._seconds)
        if not connections[question.using].features.has_select_for_update_skip_locked:
            self._note(held, self._prolong(question, held, token), began)
            return None, []
        with ReadCommitted(question.using):
            # Skips a row that its own handler, or a person, has locked, because the other leases
            # would lapse during the wait.
            free = lock_free(question, held)
            kept = self._prolong(question, free, token)
        self._note(free, kept, began)
        renewed = set(free)
        return question, [pk for pk in held if pk not in renewed]

    def _wait_for(self, question: Question[Any], locked: list[Any]) -> None:
        """Wait for the lock of the row whose lease ends first, and renew it."""
        with self._lock:
            ours = [pk for pk in locked if pk in self._tokens]
            pk = min(ours, key=lambda pk: self._alive_until[pk], default=None)
        if pk is None:
            return
        # The other leases are renewed in between.
        seconds = min(self._seconds / 4 / len(ours), LONGEST_WAIT)
        try:
            # Race: double claim. Other workers skip a locked row. When its lock is released after
            # its lease has lapsed, the first session in line gets the row, and this one is first.
            using = question.using
            with settlement_transaction(using), lock_timeout(using, seconds):
                lock_rows(question, [pk])
                # Read after the wait, because the lease begins now.
                began = time.monotonic()
                now = clock.read(question.table, [pk])
                if now is None:
                    return
                token = now + timedelta(seconds=self._seconds)
                kept = self._prolong(question, [pk], token)
        except OperationalError as error:
            message = "%s: row %s is still locked: %s"
            extra = log_fields.fields(self._label, pk=pk, **log_fields.error_fields(error))
            log_fields.log(logger, logging.DEBUG, message, self._label, str(pk), error, extra=extra)
        else:
            self._note([pk], kept, began)

    def _prolong(self, question: Question[Any], pks: list[Any], token: datetime) -> set[Any]:
        """Write the token to the rows that this worker still holds; return those rows."""
        with self._lock:
            held = [pk for pk in pks if pk in self._tokens]
            known = {each for pk in held for each in self._tokens[pk]}
            # Recorded before the write: if the answer is lost, the token may still be in the row.
            for pk in held:
                self._tokens[pk].append(token)
                # Not the last one that was confirmed, which the row has if none of these arrived.
                del self._tokens[pk][2 * KEPT : -KEPT]
        if not held:
            return set()
        table = question.table
        field = self._lease.field
        if compare_and_set_all(question, held, {field: [*known]}, {field: token}) == len(held):
            return set(held)
        still = table.filter(these(held), **{field: token})
        return set(still.values_list("pk", flat=True))

    def _note(self, asked: list[Any], kept: set[Any], began: float) -> None:
        with self._lock:
            for pk in asked:
                if pk not in self._tokens:
                    continue
                if pk in kept:
                    self._alive_until[pk] = began + self._seconds
                    del self._tokens[pk][KEPT:-KEPT]
                else:
                    self._alive_until[pk] = 0.0


#: Returns whether the row of an instance is held.
Holds = Callable[[Any], bool]

_lock = threading.Lock()
_holders: dict[Field[Any, Any], list[Holds]] = {}


def leave_alone(field: Field[Any, Any], holds: Holds) -> None:
    """Let saves leave this column alone in the rows that are held, until ``write_again()``."""
    with _lock:
        # A new list, because another thread may be at a save.
        _holders[field] = [*_holders.get(field, ()), holds]
        # Where ``save()`` asks for what it writes to the column.
        vars(field)["pre_save"] = lambda instance, add: _written(field, instance, add=add)


def write_again(field: Field[Any, Any], holds: Holds) -> None:
    """Undo ``leave_alone()``."""
    with _lock:
        others = [each for each in _holders.get(field, ()) if each != holds]
        if others:
            _holders[field] = others
        else:
            _holders.pop(field, None)
            vars(field).pop("pre_save", None)


class _AsItIs:
    """The value that a column has. Django 6 would set an ``F()`` on the instance after a save."""

    def __init__(self, field: Field[Any, Any]) -> None:
        self._column = field.column

    def as_sql(self, _: Any, connection: Any) -> tuple[str, Any]:
        return connection.ops.quote_name(self._column), []


def _written(field: Field[Any, Any], instance: Any, *, add: bool) -> Any:
    for holds in _holders.get(field, ()):
        if not add and holds(instance):
            return _AsItIs(field)
    return type(field).pre_save(field, instance, add)
