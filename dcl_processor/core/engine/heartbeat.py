"""The heartbeat, which renews the leases of one worker while its handlers run."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterable
from typing import Any

from django.db import Error, connections

from dcl_processor.core.options.kinds import Lease
from dcl_processor.core.pending import steady as time
from dcl_processor.core.pending.clock import DatabaseNow
from dcl_processor.core.pending.question import Question, these
from dcl_processor.core.report.counters import log
from dcl_processor.core.report.values import as_timedelta
from dcl_processor.core.sql import isolation
from dcl_processor.core.sql.session import locking

#: Seconds that the end of a run waits for the heartbeat.
CLOSING = 10.0

#: Tokens of a row that are known: that of its claim, and the last ones that may be in the row.
KEPT = 9


class Heartbeat:
    """Renews the leases of one worker, in a thread and on a connection of its own.

    Its lock guards the tokens, and is never held during a query. A settlement and a renewal may
    come in either order, because a renewal records its token before it is sent.
    """

    def __init__(self, lease: Lease, label: str) -> None:
        self.field = lease.field
        self._lease, self._label = lease, label
        self._lock = threading.Lock()
        self._question: Question[Any] | None = None
        self._tokens: dict[Any, list[Any]] = {}
        #: Until when each lease lives, by this process's clock.
        self._alive_until: dict[Any, float] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @staticmethod
    def now() -> float:
        """Return the time by which leases live, as a claim begins."""
        return time.monotonic()

    def hold(self, question: Question[Any], tokens: dict[Any, Any], since: float) -> None:
        """Begin to renew the leases of these rows, whose claim has been committed.

        ``since``: when the claim began.
        """
        with self._lock:
            self._question = question
            for pk, token in tokens.items():
                self._tokens[pk] = [token]
                self._alive_until[pk] = since + self._lease.seconds
        # Inside Django's TestCase nothing is committed, and no other connection sees the rows.
        if self._thread is None and not connections[question.using].in_atomic_block:
            name = f"{self._label}: leases"
            self._thread = threading.Thread(target=self._keep, name=name, daemon=True)
            self._thread.start()

    def let_go(self, pk: Any) -> list[Any]:
        """Stop renewing a row's lease; return the tokens that recognise it."""
        with self._lock:
            self._alive_until.pop(pk, None)
            return self._tokens.pop(pk, [])

    def is_ours(self, pk: Any) -> bool:
        """Return whether the lease is alive, as far as this process knows."""
        with self._lock:
            return time.monotonic() < self._alive_until.get(pk, 0.0)

    def close(self) -> None:
        """End the thread; leases that are still held lapse."""
        self._stop.set()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(CLOSING)

    def _keep(self) -> None:
        pause = third = self._lease.seconds / 3
        try:
            while not self._stop.wait(pause):
                try:
                    self._renew()
                    pause = third
                except Error as error:
                    # There is time for several more beats before the lease lapses.
                    pause = 0.01
                    said = "%s: the heartbeat did not renew the leases, and tries again: %s"
                    log(logging.WARNING, said, self._label, error)
        finally:
            connections.close_all()

    def _renew(self) -> None:
        with self._lock:
            question, held = self._question, [*self._tokens]
        if question is None or not held:
            return
        since = time.monotonic()
        with isolation.read_committed(question.using, self._label):
            # A row that another session has locked keeps its lease until the next beat.
            rows = locking(question.table.filter(these(held)).order_by())
            free = [*rows.values_list("pk", flat=True)]
            kept = self._write(question, free) if free else set()
        self._note_alive(free, kept, since)
        late = [pk for pk in held if pk not in set(free)]
        if late:
            # Behind the session that has the rows locked, and before any SKIP LOCKED.
            since = time.monotonic()
            with isolation.read_committed(question.using, self._label):
                isolation._execute(
                    connections[question.using],
                    f"SET LOCAL lock_timeout = {int(self._lease.seconds * 1000 / 4)}",
                )
                rows = (
                    question.table.filter(these(late)).order_by("pk").select_for_update(no_key=True)
                )
                free = [*rows.values_list("pk", flat=True)]
                kept = self._write(question, free) if free else set()
            self._note_alive(free, kept, time.monotonic())

    def _note_alive(self, free: Any, kept: Any, since: float) -> None:
        with self._lock:
            for pk in free:
                if pk in self._alive_until:
                    self._alive_until[pk] = since + self._lease.seconds if pk in kept else 0.0

    def _write(self, question: Question[Any], pks: Collection[Any]) -> set[Any]:
        """Renew the leases of rows that are locked; return those that were still ours."""
        table, name = question.table.filter(these(pks)).order_by(), self.field
        now = table.annotate(dcl_now=DatabaseNow()).values_list("dcl_now", flat=True)
        token = next(iter(now[:1])) + as_timedelta(self._lease.duration)
        known = self._note(pks, token)
        if not known:
            return set()
        with self._lock:
            pks = [pk for pk in pks if token in self._tokens.get(pk, ())] or []
        if not pks:
            return set()
        table = question.table.filter(these(pks)).order_by()
        ours = table.filter(**{f"{name}__in": known})
        if ours.update(**{name: token}) == len(pks):
            return {*pks}
        return {*table.filter(**{name: token}).values_list("pk", flat=True)}

    def _note(self, pks: Iterable[Any], token: Any) -> set[Any]:
        """Record a token of rows before it is sent; return those that may be in the rows."""
        # Race: lost lease that writes. The token is known before it can be in the row.
        known: set[Any] = set()
        with self._lock:
            for pk in pks:
                tokens = self._tokens.get(pk)
                if tokens is not None:
                    known.update(tokens)
                    tokens.append(token)
                    del tokens[1:-KEPT]
        return known
