"""Where the handlers of marked rows run: here, in threads, or on an event loop.

The engine's thread gives calls with ``submit()``, and takes results with ``collect()``. Only the
handlers, and the resource that they need, are elsewhere: no other thread touches the run.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context, copy_context
from queue import Empty, SimpleQueue
from typing import Any

from asgiref.sync import SyncToAsync, ThreadSensitiveContext, sync_to_async
from django.db import connections
from django.db.backends.signals import connection_created
from django.utils import timezone, translation

from dcl_processor.core.engine.calls import (
    START,
    Call,
    Handler,
    Result,
    in_test_savepoint,
    left_open,
    open_aliases,
    without_work,
)
from dcl_processor.core.engine.poison import Notes
from dcl_processor.core.engine.resource import Resource
from dcl_processor.core.options.options import Definition
from dcl_processor.core.report.interrupts import ends_the_run
from dcl_processor.core.report.outcomes import Failed
from dcl_processor.core.sql.errors import is_connected

#: Seconds between two looks for a signal by a thread that waits.
LOOK = 1.0

#: Returns the outcome of rows that may not start, in whichever thread they are about to.
Refused = Callable[[Call], Result]


class Inline:
    """Calls the handlers in the engine's thread, one after another."""

    def __init__(
        self, handler: Handler, resource: Resource, refused: Refused, notes: Notes
    ) -> None:
        self._handler, self._resource, self._refused = handler, resource, refused
        self._notes = notes
        self._calls: deque[Call] = deque()
        self._known = open_aliases()

    @property
    def failure(self) -> BaseException | None:
        """Why the resource could not be opened."""
        return self._resource.error

    def submit(self, call: Call) -> None:
        self._calls.append(call)

    def collect(self, timeout: float | None = None) -> tuple[Call, Any] | None:  # noqa: ARG002
        """Return a call that has ended, and its result; an exception ends the run."""
        if not self._calls:
            return None
        call = self._calls.popleft()
        self._notes.note([row.pk for row in call.rows])
        is_connected(call.batch.question.using)
        with in_test_savepoint(call.batch.question.using):
            return call, handle(call, self._handler, self._resource, self._refused, self._known)

    def close(self) -> None:
        self._resource.close()


def handle(
    call: Call, handler: Handler, resource: Resource, refused: Refused, known: set[str]
) -> Result:
    """Call a plain handler in this thread, outside any transaction."""
    call.batch.started += call.rows  # before the look: the end of a run looks the other way round
    is_ready, answer = False, None
    try:
        answer = refused(call)
        is_ready = answer is START and resource.ready()
    finally:
        if not is_ready:
            call.batch.started = [row for row in call.batch.started if row not in call.rows]
    if not is_ready:
        return None if answer is START else answer
    result = handler.call(call.rows, resource.arguments)
    if left_open(known):
        result = without_work(result)
    if fails(result):
        resource.reopen_later()
    return result


def fails(result: Result) -> bool:
    some = result.values() if isinstance(result, dict) else [result]
    return any(isinstance(each, Failed) for each in some)


class Threads:
    """Calls plain handlers in threads, each with connections and a resource of its own."""

    def __init__(
        self, handler: Handler, processor: Definition[Any], size: int, refused: Refused
    ) -> None:
        self._handler, self._processor, self._refused = handler, processor, refused
        self._size = size
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._results: SimpleQueue[tuple[Call, Any]] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self.failure: BaseException | None = None

    def submit(self, call: Call) -> None:
        self._calls.put(call)
        if len(self._threads) < self._size:
            number = len(self._threads) + 1
            name = f"{self._processor.name}: {number}"
            work = copy_context().run
            arguments = (self._work, translation.get_language(), timezone.get_current_timezone())
            thread = threading.Thread(target=work, args=arguments, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def collect(self, timeout: float | None = None) -> tuple[Call, Any] | None:
        return next_of(self._results, timeout)

    def close(self) -> None:
        """End the threads when their handlers have ended."""
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self, language: str, zone: Any) -> None:
        resource = Resource(self._processor)
        try:
            with translation.override(language), timezone.override(zone):
                while (call := self._calls.get()) is not None:
                    self._results.put((call, self._handled(call, resource)))
                    self.failure = self.failure or resource.error
        finally:
            resource.close()
            connections.close_all()

    def _handled(self, call: Call, resource: Resource) -> Any:
        try:
            return handle(call, self._handler, resource, self._refused, set())
        except BaseException as error:  # noqa: BLE001  # raised again in the engine's thread
            return error
        finally:
            for each in connections.all(initialized_only=True):
                each.close_if_unusable_or_obsolete()


def next_of(results: SimpleQueue[Any], timeout: float | None) -> Any:
    """Return the next result, or ``None`` if there is none in so many seconds.

    It looks for a signal now and then, which no wait would notice.
    """
    while True:
        try:
            return results.get(timeout=LOOK if timeout is None else timeout)
        except Empty:
            if timeout is not None:
                return None


class Loop:
    """Calls asynchronous handlers as tasks of one event loop, in a thread of its own.

    Their work in the database is in the one thread of ``sync_to_async()``.
    """

    def __init__(self, handler: Handler, processor: Definition[Any], refused: Refused) -> None:
        self._handler, self._refused = handler, refused
        self._results: SimpleQueue[tuple[Call, Any]] = SimpleQueue()
        self._resource = Resource(processor, self._run)
        self._loop = asyncio.new_event_loop()
        self._uses_database = self._is_over = False
        # Not the caller's context: its only thread for database calls may wait for the run.
        self._sensitive = ThreadSensitiveContext()
        self._context = Context()
        self._context.run(SyncToAsync.thread_sensitive_context.set, self._sensitive)
        settings = translation.get_language(), timezone.get_current_timezone()
        self._thread = threading.Thread(
            target=self._work, args=settings, name=f"{processor.name}: loop", daemon=True
        )
        connection_created.connect(self._connected, weak=False, dispatch_uid=id(self))
        self._thread.start()

    @property
    def failure(self) -> BaseException | None:
        return self._resource.error

    def _connected(self, **_: Any) -> None:
        self._uses_database = True

    def _work(self, language: str, zone: Any) -> None:
        with translation.override(language), timezone.override(zone):
            asyncio.set_event_loop(self._loop)
            while not self._is_over:
                # A task of a handler's own that calls sys.exit() ends the loop, and no other row.
                with suppress(BaseException):
                    self._loop.run_forever()
            self._loop.close()

    def _run(self, coroutine: Any) -> Any:
        return self._start(coroutine).result()

    def _start(self, coroutine: Any) -> Any:
        return self._context.run(asyncio.run_coroutine_threadsafe, coroutine, self._loop)

    def submit(self, call: Call) -> None:
        # The resource is opened in the engine's thread, because opening one may block.
        answer = self._refused(call)
        if answer is START and self._resource.ready():
            call.batch.started += call.rows
            self._start(self._handle(call, self._resource.arguments))
        else:
            self._results.put((call, None if answer is START else answer))

    async def _handle(self, call: Call, arguments: tuple[Any, ...]) -> None:
        try:
            result: Any = await self._handler.call_async(call.rows, arguments)
            if self._uses_database and await sync_to_async(left_open)(set()):
                result = without_work(result)
        except BaseException as error:  # noqa: BLE001  # raised again in the engine's thread
            result = error
        self._results.put((call, result))

    def collect(self, timeout: float | None = None) -> tuple[Call, Any] | None:
        ended = next_of(self._results, timeout)
        if ended is not None and fails(ended[1]):
            self._resource.reopen_later()
        return ended

    def close(self) -> None:
        """Cancel what is still under way, and end the thread."""
        connection_created.disconnect(dispatch_uid=id(self))
        try:
            self._run(self._cancel())
            self._resource.close()
        finally:
            self._is_over = True
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            executor = SyncToAsync.context_to_thread_executor.pop(self._sensitive, None)
            if executor is not None:
                executor.shutdown()

    async def _cancel(self) -> None:
        tasks = [each for each in asyncio.all_tasks() if each is not asyncio.current_task()]
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._uses_database:
            await sync_to_async(connections.close_all)()


Executor = Inline | Threads | Loop


def is_interrupt(result: Any) -> bool:
    """Return whether a result is an interrupt that ends the run."""
    return isinstance(result, BaseException) and ends_the_run(result)
