"""Finds the holders of a row's lock by waiting for it, for a moment, on a connection of its own.

It also finds a lock that a released savepoint took. If the lock is free, the probe itself holds it
until its rollback, and a worker that comes just then skips the row in this pass.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from django.db import connections, transaction

from dcl_processor.candidates.question import Question
from dcl_processor.database.contention import (
    is_contention,
    is_database_error,
    is_statement_timeout,
)
from dcl_processor.locking.waiting import lock_rows, lock_timeout

from .answer import Answer, document_of
from .locks import Holder, sessions, unseen

#: Seconds: how long the probe waits for the lock, and how often it is looked at meanwhile.
WAIT, INTERVAL = 0.2, 0.01


@dataclass(frozen=True, slots=True)
class Probed:
    """Whether a row is locked, and the sessions that a lock has to wait for, if they are known."""

    is_locked: bool
    holders: tuple[Holder, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {"is_locked": self.is_locked, "holders": document_of(self.holders)}


def probe(question: Question[Any], pk: Any) -> Answer[Probed]:
    """Return whether the row can be locked now, and otherwise who holds its lock."""
    using = question.using
    if not connections[using].features.has_select_for_update:
        return Answer.not_recorded(unseen(using))
    waiter = _Waiter(question, pk)
    waiter.start()
    pid = waiter.pid.get()
    pids: list[int] = []
    while waiter.is_alive():
        if pid is not None:
            pids = _blocking(using, pid) or pids
        waiter.join(INTERVAL)
    if waiter.error is not None:
        raise waiter.error
    return Answer(Probed(waiter.is_locked, sessions(using, pids) if waiter.is_locked else ()))


class _Waiter(threading.Thread):
    """Waits for the row's lock; a thread has a connection of its own."""

    def __init__(self, question: Question[Any], pk: Any) -> None:
        super().__init__(name="dcl_processor.probe", daemon=True)
        self._question = question
        self._pk = pk
        #: Gets the process id of the session on PostgreSQL, ``None`` elsewhere.
        self.pid: SimpleQueue[int | None] = SimpleQueue()
        self.is_locked = False
        self.error: BaseException | None = None

    def run(self) -> None:
        using = self._question.using
        try:
            with transaction.atomic(using=using):
                with lock_timeout(using, WAIT):
                    self.pid.put(_backend(using))
                    for table in self._question.tables:
                        lock_rows(self._question, table, [self._pk])
                transaction.set_rollback(True, using=using)
        except Exception as error:  # noqa: BLE001  # raised again in the thread that asked
            timed_out = is_database_error(error) and (
                is_contention(error) or is_statement_timeout(error)
            )
            self.is_locked, self.error = timed_out, None if timed_out else error
        finally:
            self.pid.put(None)  # in case there was an error before
            connections[using].close()


def _backend(using: str) -> int | None:
    if connections[using].vendor != "postgresql":
        return None
    with connections[using].cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        pid: int = cursor.fetchone()[0]
    return pid


def _blocking(using: str, pid: int) -> list[int]:
    with connections[using].cursor() as cursor:
        cursor.execute("SELECT pg_blocking_pids(%s)", [pid])
        pids: list[int] = cursor.fetchone()[0]
    return pids
