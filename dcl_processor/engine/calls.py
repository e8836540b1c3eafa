"""One call of a handler, and the outcomes of its rows."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import Context
from dataclasses import dataclass
from typing import Any

from asgiref.sync import async_to_sync
from django.db import Error, connections

from dcl_processor.engine.rows import Batch, Row
from dcl_processor.options.options import Definition
from dcl_processor.pending import steady as time
from dcl_processor.report.errors import HandlerCancelled, ends_the_run, raise_interrupt
from dcl_processor.report.exceptions import HandlerTimeout, TransactionLeftOpen, Unsupported
from dcl_processor.report.outcomes import Failed, Handled, Outcome, judge, returned_error
from dcl_processor.report.values import seconds
from dcl_processor.sql.isolation import in_test_case, in_transaction, is_lost, roll_back, says_open


@dataclass(slots=True, eq=False)
class Call:
    """A call of a handler; ``is_started``: the thread that calls it writes that alone.

    ``context``: that in which the observers were called, if there are any.
    """

    batch: Batch
    rows: Sequence[Row]
    is_started: bool = False
    context: Context | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Limited:
    """A call that is under way and may take ``limit`` seconds; ``since``: by the steady clock."""

    label: str
    pks: Sequence[Any]
    since: float
    limit: float


#: The calls with a limit that are under way in this process, in any thread, for one that ends the
#: process if a handler cannot be interrupted.
limited: set[Limited] = set()

#: In the place of a result: the call may start.
START: Any = object()

#: Of each row, by key; or of the call as a whole, if it raised; ``None``: it was not started.
Result = Mapping[Any, Outcome] | Outcome | None


class Handler:
    """The processor's handler, as it is called: limited in time, and with outcomes for errors."""

    def __init__(self, processor: Definition[Any]) -> None:
        self._processor = processor
        limit = processor.handler_timeout
        self.seconds = None if limit is None else seconds(limit)
        self.is_batch = processor._handles_batches
        function: Any = processor.process_batch if self.is_batch else processor.process
        self._function = function
        self._process = os.getpid()

    def call(
        self, rows: Sequence[Row], arguments: tuple[Any, ...], context: Context | None = None
    ) -> Result:
        """Call the handler in this thread; any error becomes an outcome, or ends the run."""
        if context is not None:
            return context.run(self.call, rows, arguments)
        if self._processor._is_async:
            result: Result = async_to_sync(self.call_async)(rows, arguments)
            return result
        since = time.monotonic()
        given = [row.instance for row in rows] if self.is_batch else rows[0].instance
        try:
            if self.seconds is None:
                result = self._function(given, *arguments)
            else:
                with self._noted(rows, since, self.seconds), alarm(self.seconds):
                    result = self._function(given, *arguments)
            return self._understood(rows, result, since)
        except BaseException as error:  # noqa: BLE001  # _judged() raises what ends the run
            return self._judged(error, since)

    async def call_async(self, rows: Sequence[Row], arguments: tuple[Any, ...]) -> Result:
        """Call the handler, a coroutine function, on the event loop."""
        since, limit = time.monotonic(), self.seconds
        timeout = asyncio.timeout(limit)
        try:
            with nullcontext() if limit is None else self._noted(rows, since, limit):
                async with timeout:
                    result = await self._function(rows[0].instance, *arguments)
            if limit is not None and timeout.expired():  # whatever the handler makes of it
                return self._judged(HandlerTimeout(limit), since)
            return self._understood(rows, result, since)
        except BaseException as error:  # noqa: BLE001  # as above
            if limit is not None and timeout.expired() and not ends_the_run(error):
                late = HandlerTimeout(limit)
                late.__cause__ = error
                error = late
            return self._judged(error, since)

    @contextmanager
    def _noted(self, rows: Sequence[Row], since: float, limit: float) -> Iterator[None]:
        noted = Limited(self._processor.name, [row.pk for row in rows], since, limit)
        limited.add(noted)
        try:
            yield
        finally:
            limited.discard(noted)

    def _judged(self, error: BaseException, since: float) -> Outcome:
        if os.getpid() != self._process:
            os._exit(1)  # the handler has forked it, and the session is its parent's
        raise_interrupt(error)
        return judge(error, duration=time.monotonic() - since)

    def _understood(self, rows: Sequence[Row], result: Any, since: float) -> Result:
        if os.getpid() != self._process:
            os._exit(0)  # as above
        duration = time.monotonic() - since
        if not self.is_batch:
            return returned(result, duration)
        if (raised := returned_error(result)) is not None:
            # An object that a module keeps for all its calls would collect their tracebacks.
            return judge(raised.with_traceback(None), duration=duration)
        return outcomes_of(self._processor.name, [row.pk for row in rows], result, duration)


def outcomes_of(label: str, keys: Sequence[Any], results: Any, duration: float) -> Result:
    """Return the outcome of each row, by key, from what ``process_batch()`` returned.

    Where that says nothing of each row, the call has failed, although its work may be done.
    """
    if results is None:
        return {pk: Handled(None, duration) for pk in keys}
    _refuse_coroutine(results)
    is_list = isinstance(results, Sequence) and not isinstance(results, str | bytes)
    if not is_list or len(results) != len(keys):
        error = Unsupported(
            f"{label}: expected process_batch() to return None, or a list with one result for each "
            f"of {len(keys)} rows, in their order, got {results!r:.100}."
        )
        return Failed(error, handled=True, duration=duration)
    pairs = zip(keys, results, strict=True)
    return {pk: returned(result, duration, kept=True) for pk, result in pairs}


def returned(result: Any, duration: float | None, *, kept: bool = False) -> Outcome:
    """Return the outcome that a row's result stands for; a returned exception is as one raised."""
    if result is None:
        return Handled(None, duration)
    if (error := returned_error(result)) is not None:
        return judge(error, kept=kept, duration=duration)
    _refuse_coroutine(result)
    return Handled(result, duration)


def _refuse_coroutine(result: Any) -> None:
    if inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result):
        getattr(result, "close", bool)()
        raise Unsupported(
            "expected the handler to do its work and return, got a "
            f"{type(result).__name__} that is never run; iterate over it, await it, or use "
            "async_to_sync()."
        )


# --- a limit of time, for plain handlers in the main thread


#: Seconds between two interrupts of a handler that goes on.
AGAIN = 1.0


@contextmanager
def alarm(limit: float) -> Iterator[None]:
    """Raise ``HandlerCancelled`` in the block after so many seconds, then ``HandlerTimeout``."""
    fired: list[bool] = []

    def cancel(*_: Any) -> None:
        fired.append(True)
        raise HandlerCancelled

    before = signal.signal(signal.SIGALRM, cancel)
    signal.setitimer(signal.ITIMER_REAL, limit, AGAIN)
    try:
        yield
    except BaseException as error:
        # Whatever the handler makes of the interrupt, its row has failed; another one ends the run.
        ours = isinstance(error, HandlerCancelled | BaseExceptionGroup)
        if fired and (ours or not ends_the_run(error)):
            raise HandlerTimeout(limit) from error
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    if fired:
        raise HandlerTimeout(limit)


def can_interrupt() -> bool:
    """Return whether a plain handler can be interrupted in this thread."""
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and hasattr(signal, "SIGALRM")


# --- transactions that a handler has left open


def open_aliases() -> set[str]:
    """Return the aliases on which a transaction is open in this thread."""
    found = connections.all(initialized_only=True)
    return {each.alias for each in found if each.in_atomic_block or in_transaction(each)}


def left_open(known: set[str]) -> bool:
    """Roll back the transactions that are open in this thread; return whether there were any.

    ``known``: aliases on which one was open before.
    """
    found = False
    for each in connections.all(initialized_only=True):
        if each.alias in known or in_test_case(each):
            continue
        if each.in_atomic_block or in_transaction(each) or says_open(each):
            # Race: flip without work. What the handler has written there is not committed.
            roll_back(each)
            found = True
        elif is_lost(each):
            each.close()  # the next row's handler has a new one
    return found


@contextmanager
def in_test_savepoint(using: str) -> Iterator[None]:
    """Inside Django's ``TestCase`` keep an error of the handler from breaking its transaction."""
    connection = connections[using]
    if not in_test_case(connection):
        yield
        return
    point: Any = connection.savepoint()
    yield
    try:
        connection.savepoint_commit(point)
    except Error:
        connection.set_rollback(False)
        connection.savepoint_rollback(point)


def without_work(result: Result, *, shared: bool = False) -> Result:
    """Return the result of a call whose work was rolled back."""
    if isinstance(result, Mapping):
        return {pk: without_work(each) for pk, each in result.items()}  # type: ignore[misc]
    if isinstance(result, Handled):
        return Failed(TransactionLeftOpen(shared=shared), handled=True, duration=result.duration)
    return result
