"""The limits of a run: rows, seconds, and a stop from outside."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import timedelta
from threading import Event, current_thread, main_thread
from typing import TYPE_CHECKING, Any

from django.db import connections
from django.db.models import Q

from dcl_processor import steady as time
from dcl_processor.candidates import scan
from dcl_processor.candidates.question import Question
from dcl_processor.exceptions import TooManyPending, Unsupported
from dcl_processor.oversight import LEDGER, has_ledger, installed
from dcl_processor.report import MOST_COUNTED, Stopped
from dcl_processor.values import DAY, expect, expect_seconds, expect_whole_number

if TYPE_CHECKING:
    from dcl_processor.definition.definition import Definition

# The first wait is about as long as a short handler, the longest about as long as a person waits.
# Half of each wait is random, so that workers that collided once do not collide again.
FIRST_WAIT, LONGEST_WAIT = 0.05, 1.0

#: Handlers in flight at once. Each thread has its own connection; servers allow hundreds of them.
MOST_THREADS, MOST_TASKS = 1_000, 10_000

#: Seconds, for locked rows. A run that waits longer only keeps a worker busy.
LONGEST_WAIT_FOR_LOCKED = DAY


class Limits:
    """Decides when a run may start no further row, and how long it may wait."""

    def __init__(
        self,
        *,
        limit: int | None,
        timeout: float | timedelta | None,
        wait_for_locked: float | timedelta,
        stop: Event | None,
    ) -> None:
        if limit is not None:
            expect_whole_number("expected limit", limit, of="rows", least=0)
        self.rows = limit
        self._deadline = None
        if timeout is not None:
            self._deadline = time.monotonic() + expect_seconds("expected timeout", timeout)
        self._wait = expect_seconds(
            "expected wait_for_locked",
            wait_for_locked,
            most=LONGEST_WAIT_FOR_LOCKED,
            fix="; the next run finds the rows that are still locked",
        )
        self._wait_end: float | None = None
        self._stop = stop or Event()

    @property
    def is_told_to_stop(self) -> bool:
        """Whether ``stop`` is set."""
        return self._stop.is_set()

    def exceeded(self, handled: int) -> Stopped | None:
        """Return why no further row may start, or ``None`` if one may."""
        if self._stop.is_set():
            return "signal"
        if self.rows is not None and handled >= self.rows:
            return "limit"
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return "timeout"
        return None

    def clip(self, size: int, handled: int) -> int:
        """Return how many of ``size`` rows the limit leaves room for."""
        return size if self.rows is None else min(size, self.rows - handled)

    def pause(self, seconds: float) -> None:
        """Wait so long, or until a stop or the end of ``timeout``."""
        if self._deadline is not None:
            seconds = min(seconds, self._deadline - time.monotonic())
        if seconds > 0:
            self._stop.wait(seconds)

    def waits(self) -> Iterator[bool]:
        """Wait a little longer each time, until ``wait_for_locked`` or ``timeout`` is over.

        ``wait_for_locked`` begins at the first call, also for later calls, whose first waits are
        short again.
        """
        if self._wait_end is None:
            self._wait_end = time.monotonic() + self._wait
        # Race: endless run. The run waits for rows that other workers keep locked until then.
        end = self._wait_end
        if self._deadline is not None:
            end = min(end, self._deadline)
        pause = FIRST_WAIT
        while (left := end - time.monotonic()) > 0:
            self._stop.wait(min(left, pause * random.uniform(0.5, 1)))  # noqa: S311  # no secret
            yield True
            pause = min(pause * 2, LONGEST_WAIT)


def refuse_backlog(label: str, question: Question[Any], most: int, *, seen: int | None) -> None:
    """Raise ``TooManyPending`` if more than ``most`` rows wait; ``seen``: in the first window."""
    enough = max(most, min(10 * most, MOST_COUNTED))
    # A window of an own-table question has each row once, so that one which is not full has all.
    has_all = seen == 0 or (question.own_table and seen is not None and seen < scan.WINDOW)
    number = seen if seen is not None and has_all else scan.count(question, enough)
    if number > most:
        got = number if number <= enough else f"more than {enough}"
        raise TooManyPending(
            f"{label}: expected at most max_pending={most} pending rows in a run without limit, "
            f"got {got}; pass limit=… (--limit) to handle some of them first, or raise max_pending."
        )


def check_concurrency(concurrency: Any, *, is_async: bool = True) -> None:
    """Raise unless this number of handlers may be in flight at once."""
    most = MOST_TASKS if is_async else MOST_THREADS
    expect_whole_number("expected concurrency", concurrency, of="handlers", least=1, most=most)


def refuse_threads_in_tests(label: str, threads: int) -> None:
    """Raise ``Unsupported`` for threads inside a ``TestCase``."""
    if threads:
        raise Unsupported(
            f"{label}: expected concurrency=1 for a plain handler inside a TestCase, whose rows "
            f"no other thread sees, got {threads}; run it with concurrency=1, or use a "
            "TransactionTestCase."
        )


def refuse_tenant(using: str, label: str) -> None:
    """Raise ``Unsupported`` if django-tenants has chosen a tenant for the run's session alone."""
    tenant = getattr(connections[using], "schema_name", None)
    if tenant not in {None, "public"}:
        raise Unsupported(
            f"{label}: expected a plain handler without a lease and without threads for one "
            f"tenant, got the tenant {tenant!r} and a processor with further sessions, which see "
            "the public schema; choose TRANSACTIONAL."
        )


def refuse_time_limit_elsewhere(label: str, concurrency: int) -> None:
    """Raise ``Unsupported`` unless a plain handler is called in the main thread."""
    thread = current_thread()
    if concurrency > 1 or thread is not main_thread():
        got = f"concurrency={concurrency}" if concurrency > 1 else f"the thread {thread.name!r}"
        raise Unsupported(
            f"{label}: expected handler_timeout with a plain handler in the main thread and "
            f"concurrency=1, got {got}; write an async handler, start more workers, or leave "
            "handler_timeout out."
        )


def check_stop(stop: Any) -> None:
    """Raise unless ``stop`` has ``is_set`` and ``wait``, as a ``threading.Event`` has."""
    fits = stop is None or (hasattr(stop, "is_set") and hasattr(stop, "wait"))
    words = "a threading.Event, which ends the run when it is set"
    expect(fits, "expected stop", words, stop)


def check_alias(name: str, alias: str | None) -> None:
    """Raise ``InvalidOption`` unless the alias is one of the settings' ``DATABASES``."""
    known = connections.databases
    words = f"one of the databases {', '.join(known)}"
    expect(alias is None or alias in known, f"expected {name}", words, alias)


def check_filter(filter: Any) -> None:
    """Raise ``InvalidOption`` unless the filter can be ANDed into a queryset."""
    fits = filter is None or isinstance(filter, Q) or getattr(filter, "conditional", False)
    expect(fits, "expected filter", "a Q object", filter)


def refuse_small_pool(
    using: str, label: str, *, threads: int, loop: bool, heartbeat: bool, overseer: int = 0
) -> None:
    """Raise ``Unsupported`` unless the alias's pool has a connection for each thread of a run.

    ``threads``: the threads besides the run's own; ``loop``: whether handlers are asynchronous, and
    query in one thread more. Slots and listeners have sessions beside the pool. Sends no query.
    """
    connection: Any = connections[using]
    pool = getattr(connection, "pool", None)
    # Inside TestCase there is one connection and no heartbeat.
    if pool is None or connection.in_atomic_block:
        return
    needed = 1 + threads + loop + heartbeat + overseer
    if pool.max_size < needed:
        each = f", one for each of {threads} threads" if threads else ""
        each += ", one for the thread of async handlers" if loop else ""
        renewals = ", and one for the heartbeat" if heartbeat else ""
        renewals += ", and one for the ledger" if overseer else ""
        raise Unsupported(
            f"{label}: expected a connection pool on {using!r} with room for {needed} connections, "
            f"one for the run{each}{renewals}, got max_size={pool.max_size}; raise max_size in "
            "OPTIONS['pool'], or lower concurrency."
        )


#: Seconds. A run waits for a hold of the ledger up to this long, as it waits for locked rows, and
#: ends at a longer one, so that no worker is kept busy by waiting.
LONGEST_HOLD = 10.0


def refuse_without_ledger(processor: Definition[Any]) -> None:
    """Raise ``Unsupported`` if the processor has a ``rate``, which only the ledger can keep."""
    if processor.rate is not None and installed() is None:
        got = "DCL_PROCESSOR_LEDGER=False" if has_ledger() else "none"
        raise Unsupported(
            f"{processor.name}: expected {LEDGER!r} in INSTALLED_APPS, and on, for rate, which all "
            f"machines keep together, got {got}; add the app and migrate, or leave rate out."
        )
