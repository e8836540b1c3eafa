"""The heartbeat, which renews the leases of one worker while its handlers run."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterable
from contextvars import copy_context
from typing import Any

from django.db import connections

from dcl_processor.options.kinds import Lease
from dcl_processor.pending import steady as time
from dcl_processor.pending.clock import DatabaseNow
from dcl_processor.pending.question import Question, these
from dcl_processor.report.log import log
from dcl_processor.report.values import as_timedelta
from dcl_processor.sql import isolation
from dcl_processor.sql.session import locking

#: Seconds that the end of a run waits for the heartbeat.
CLOSING = 10.0

#: Tokens of a row that are known: that of its claim, and the last ones that may be in the row.
KEPT = 9


class Heartbeat:
    """Renews the leases of one worker, in a thread and on a connection of its own.

    Its lock guards the tokens, and is never held during a query. A renewal records its token before
    it is sent, so that a settlement may come before it or behind it. ``failure``: why the thread
    ended; no row may start then.
    """

    def __init__(self, lease: Lease, label: str) -> None:
        self.field = lease.field
        self.failure: BaseException | None = None
        self._lease, self._label = lease, label
        self._lock = threading.Lock()
        self._question: Question[Any] | None = None
        self._tokens: dict[Any, list[Any]] = {}
        #: Until when each lease lives, by this process's clock.
        self._alive_until: dict[Any, float] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

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
            work, name = copy_context().run, f"{self._label}: leases"
            self._thread = threading.Thread(target=work, args=(self._keep,), name=name, daemon=True)
            self._thread.start()

    def tokens(self, pk: Any) -> list[Any]:
        """Return the tokens by which a row is recognised as this worker's."""
        with self._lock:
            return [*self._tokens.get(pk, ())]

    def let_go(self, pk: Any) -> None:
        """Stop renewing a row's lease."""
        with self._lock:
            self._alive_until.pop(pk, None)
            self._tokens.pop(pk, None)

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
                except Exception as error:  # noqa: BLE001  # without renewals all rows are lost
                    # There is time for several more beats before the lease lapses.
                    pause = self._lease.seconds / 12
                    said = "%s: the heartbeat did not renew the leases, and tries again: %s"
                    log(logging.WARNING, said, self._label, error)
        except BaseException as error:  # noqa: BLE001  # the run looks at it, and ends
            self.failure = error
        finally:
            connections.close_all()

    def _renew(self) -> None:
        with self._lock:
            question, held = self._question, [*self._tokens]
        if question is None or not held:
            return
        # Race: double claim. A row that another session has locked is waited for: behind that
        # session, and before any worker, because they pass locked rows by.
        late = self._renew_some(question, held, waits=False)
        if late:
            self._renew_some(question, late, waits=True)

    def _renew_some(
        self, question: Question[Any], pks: Collection[Any], *, waits: bool
    ) -> list[Any]:
        """Renew the leases of those rows that could be locked; return the others."""
        since, connection = time.monotonic(), connections[question.using]
        rows = question.table.filter(these(pks)).order_by("pk")
        with isolation.read_committed(question.using):
            if waits:
                limit_lock_wait(connection, self._lease.seconds / 4)
                no_key = connection.features.has_select_for_no_key_update
                rows = rows.select_for_update(no_key=no_key)
            else:
                rows = locking(rows)
            free = [*rows.values_list("pk", flat=True)]
            since = time.monotonic() if waits else since
            kept = self._write(question, free)
        with self._lock:
            for pk in free:
                if pk in self._alive_until:
                    self._alive_until[pk] = since + self._lease.seconds if pk in kept else 0.0
        return [pk for pk in pks if pk not in {*free}]

    def _write(self, question: Question[Any], pks: Collection[Any]) -> set[Any]:
        """Renew the leases of rows that are locked; return those that were still ours."""
        if not pks:
            return set()
        table, name = question.table.filter(these(pks)).order_by(), self.field
        now = table.annotate(dcl_now=DatabaseNow()).values_list("dcl_now", flat=True)
        token = next(iter(now[:1])) + as_timedelta(self._lease.duration)
        known = self._note(pks, token)
        if not known:
            return set()
        # Only rows with a token that this worker still has: a settled row has none.
        table = question.table.filter(these([*known])).order_by()
        tokens = {each for tokens in known.values() for each in tokens}
        if table.filter(**{f"{name}__in": tokens}).update(**{name: token}) == len(known):
            return {*known}
        return {*table.filter(**{name: token}).values_list("pk", flat=True)}

    def _note(self, pks: Iterable[Any], token: Any) -> dict[Any, list[Any]]:
        """Record a token of rows before it is sent; return those that may be in the rows."""
        # Race: lost lease that writes. The token is known before it can be in the row.
        known: dict[Any, list[Any]] = {}
        with self._lock:
            for pk in pks:
                tokens = self._tokens.get(pk)
                if tokens is not None:
                    known[pk] = [*tokens]
                    tokens.append(token)
                    del tokens[1:-KEPT]
        return known


def limit_lock_wait(connection: Any, seconds: float) -> None:
    """Let the open transaction wait for locks for so long at most."""
    sql = {
        "postgresql": f"SET LOCAL lock_timeout = {int(seconds * 1000)}",
        "mysql": f"SET innodb_lock_wait_timeout = {max(1, int(seconds))}",
    }.get(connection.vendor)
    if sql is not None:
        with connection.cursor() as cursor:
            cursor.execute(sql)
