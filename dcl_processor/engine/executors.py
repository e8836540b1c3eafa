"""Where the handlers of marked rows run: here, in threads, or on an event loop.

The engine's thread gives calls with ``submit()``, and takes results with ``collect()``. Only the
handlers, and the resource that they need, are elsewhere: no other thread touches the run.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context, copy_context
from queue import Empty, SimpleQueue
from typing import Any

from asgiref.sync import AsyncToSync, SyncToAsync, ThreadSensitiveContext, sync_to_async
from django.db import connections
from django.db.backends.signals import connection_created

from dcl_processor.engine.calls import (
    START,
    Call,
    Handler,
    Result,
    in_test_savepoint,
    left_open,
    open_aliases,
    without_work,
)
from dcl_processor.engine.resource import Resource
from dcl_processor.options.options import Definition
from dcl_processor.pending import steady as time
from dcl_processor.report.outcomes import Failed, Handled
from dcl_processor.sql.errors import AWAY, is_back

#: Seconds between two looks for a signal by a thread that waits.
LOOK = 1.0

#: Returns the outcome of rows that may not start, in whichever thread they are about to.
Refused = Callable[[Call], Result]


class Inline:
    """Calls the handlers in the engine's thread, one after another."""

    def __init__(self, handler: Handler, resource: Resource, refused: Refused) -> None:
        self._handler, self._resource, self._refused = handler, resource, refused
        self._calls: deque[Call] = deque()
        self._known, self._is_away = open_aliases(), False
        #: That of the resource, which is the run's.
        self.failure: BaseException | None = None

    def submit(self, call: Call) -> None:
        self._calls.append(call)

    def collect(self, timeout: float | None = None) -> tuple[Call, Any] | None:
        """Return a call that has ended, and its result; an exception ends the run."""
        if not self._calls or timeout == 0:
            return None  # a handler is called only when its row is waited for
        call = self._calls.popleft()
        self._is_away = not is_back(call.batch.question.using, 0 if self._is_away else AWAY)
        if self._is_away:
            return call, None
        with in_test_savepoint(call.batch.question.using):
            return call, handle(call, self._handler, self._resource, self._refused, self._known)

    def close(self) -> None:
        self._resource.close()


def handle(
    call: Call, handler: Handler, resource: Resource, refused: Refused, known: set[str]
) -> Result:
    """Call a plain handler in this thread, outside any transaction."""
    call.is_started = True  # before the look: the end of a run looks the other way round
    is_ready, answer = False, None
    try:
        answer = refused(call)
        is_ready = answer is START and resource.ready()
    finally:
        call.is_started = is_ready
    if not is_ready:
        return None if answer is START else answer
    result = handler.call(call.rows, resource.arguments, call.context)
    if left_open(known):
        result = without_work(result)
    if fails(result):
        resource.is_stale = True
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
            name, work = f"{self._processor.name}: {number}", copy_context().run
            thread = threading.Thread(target=work, args=(self._work,), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def collect(self, timeout: float | None = None) -> tuple[Call, Any] | None:
        lives = lambda: any(each.is_alive() for each in self._threads)  # noqa: E731
        return next_of(self._results, timeout, lives)

    def close(self) -> None:
        # Also for a thread that was started when an interrupt came, and is not in the list.
        for _ in range(self._size):
            self._calls.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        resource = Resource(self._processor)
        try:
            while (call := self._calls.get()) is not None:
                result: Any = RuntimeError("the handler's thread ended without a result")
                try:
                    result = self._handled(call, resource)
                finally:
                    self._results.put((call, result))
                self.failure = self.failure or resource.failure
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


def next_of(
    results: SimpleQueue[tuple[Call, Any]], timeout: float | None, lives: Callable[[], bool]
) -> tuple[Call, Any] | None:
    """Return the next result, or ``None`` if there is none in so many seconds."""
    while True:
        try:
            return results.get(timeout=LOOK if timeout is None else timeout)
        except Empty:
            if timeout is not None:
                return None
            if not lives():
                raise RuntimeError("the threads that call the handlers have ended") from None


class Loop:
    """Calls asynchronous handlers as tasks of one event loop, in a thread of its own.

    Their work in the database is in the one thread of ``sync_to_async()``.
    """

    def __init__(self, handler: Handler, processor: Definition[Any], refused: Refused) -> None:
        self._handler, self._refused = handler, refused
        self._results: SimpleQueue[tuple[Call, Any]] = SimpleQueue()
        self._processor = processor
        self._resource = Resource(processor, self._run)
        #: Calls in flight by their resource, and the resources that are closed without them.
        self._users: Counter[Resource] = Counter()
        self._worn: set[Resource] = set()
        #: Calls under way, and those of them whose work may have been rolled back.
        self._under_way: set[Call] = set()
        self._spoilt: set[Call] = set()
        self._loop = asyncio.new_event_loop()
        self._loop.time = time.monotonic  # type: ignore[method-assign]  # also in a test of the user's
        self._uses_database = self._is_cancelled = self._is_over = False
        self.failure: BaseException | None = None
        self._sensitive = ThreadSensitiveContext()
        self._thread = threading.Thread(
            target=self._work, name=f"{processor.name}: loop", daemon=True
        )

    def _connected(self, **_: Any) -> None:
        self._uses_database = True

    def _work(self) -> None:
        asyncio.set_event_loop(self._loop)
        while not self._is_over:
            # A task of a handler's own that calls sys.exit() ends the loop, and no other row.
            with suppress(BaseException):
                self._loop.run_forever()
        self._loop.close()

    def _run(self, coroutine: Any) -> Any:
        return self._start(coroutine).result()

    def _start(self, coroutine: Any, context: Context | None = None) -> Any:
        context = context or Context()
        # Not the caller's thread for database calls, which may wait for the run.
        context.run(SyncToAsync.thread_sensitive_context.set, self._sensitive)
        context.run(setattr, AsyncToSync.executors, "current", None)
        return context.run(asyncio.run_coroutine_threadsafe, coroutine, self._loop)

    def submit(self, call: Call) -> None:
        # The resource is opened in the engine's thread, because opening one may block.
        answer = self._refused(call)
        if self._thread.ident is None:
            connection_created.connect(self._connected, weak=False, dispatch_uid=id(self))
            self._thread.start()
        if self._resource.is_stale and self._users[self._resource]:
            self._worn.add(self._resource)
            self._resource = Resource(self._processor, self._run)
        is_ready = answer is START and self._resource.ready()
        self.failure = self._resource.failure
        if is_ready:
            call.is_started = True
            self._users[self._resource] += 1
            self._start(self._handle(call, self._resource), call.context)
        else:
            self._results.put((call, (None, None if answer is START else answer)))

    async def _handle(self, call: Call, resource: Resource) -> None:
        self._under_way.add(call)
        try:
            result: Any = await self._handler.call_async(call.rows, resource.arguments)
            if self._uses_database and await sync_to_async(left_open)(set()):
                # Race: flip without work. The others share the connection, and so its transaction.
                self._spoilt |= self._under_way
            if call in self._spoilt:
                result = without_work(result, shared=True)
        except BaseException as error:  # noqa: BLE001  # raised again in the engine's thread
            result = error
        finally:
            self._under_way.discard(call)
            self._spoilt.discard(call)
        if self._is_cancelled and not isinstance(result, Handled):
            return  # as if its process had been killed: the row keeps its mark
        self._results.put((call, (resource, result)))

    def collect(self, timeout: float | None = None) -> tuple[Call, Any] | None:
        ended = next_of(self._results, timeout, self._thread.is_alive)
        if ended is None:
            return None
        call, (resource, result) = ended
        if resource is not None:
            self._users[resource] -= 1
            if fails(result):
                resource.is_stale = True
            if resource in self._worn and not self._users[resource]:
                self._worn.discard(resource)
                resource.close()
        return call, result

    def close(self) -> None:
        """Cancel what is still under way, and end the thread."""
        if not self._thread.is_alive():  # it was not needed, or has ended
            self._loop.close()
            return
        connection_created.disconnect(dispatch_uid=id(self))
        try:
            self._run(self._cancel())
            for each in (*self._worn, self._resource):
                each.close()
        finally:
            self._is_over = True
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            executor = SyncToAsync.context_to_thread_executor.pop(self._sensitive, None)
            if executor is not None:
                # Behind a call of a cancelled handler, which may connect only now.
                executor.submit(connections.close_all)
                executor.shutdown()

    async def _cancel(self) -> None:
        self._is_cancelled = True
        tasks = [each for each in asyncio.all_tasks() if each is not asyncio.current_task()]
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


Executor = Inline | Threads | Loop
