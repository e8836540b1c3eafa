"""Asynchronous handlers: several at once on one event loop, in a thread beside the run's own.

The run's thread keeps the database connection: it claims and settles, while the loop's thread
only waits for the outside world.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
from collections.abc import Coroutine, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from contextvars import Context
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from asgiref.sync import ThreadSensitiveContext, sync_to_async
from django.db import connections

from dcl_processor.exceptions import Unsupported
from dcl_processor.execution.handler import Handled, Together, judge, understood
from dcl_processor.interrupts import ends_the_run

from .nesting import running

if TYPE_CHECKING:
    from dcl_processor.definition.definition import Definition

T = TypeVar("T")

#: Seconds that handlers have to end in after they were cancelled.
CANCEL_WITHIN = 10.0


class EventLoop:
    """An event loop in a thread of its own, for one run."""

    def __init__(self, label: str, concurrency: int) -> None:
        _refuse_green_threads(label)
        self._label = label
        self.concurrency = concurrency
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._ended: SimpleQueue[tuple[Any, Together | BaseException]] = SimpleQueue()
        # Used by the run's thread alone: what running handlers were given, by their rows' keys, and
        # the outcomes of those that ended, kept until forget() is called.
        self._under_way: dict[Any, Any] = {}
        self._outcomes: dict[Any, Together | BaseException] = {}
        # Used by the loop's thread alone.
        self._handlers: dict[Any, asyncio.Task[Any]] = {}
        self._given_up: set[Any] = set()
        # Not the caller's context: an async view that waits for the run lends its only thread for
        # database calls to the run itself, and the handlers' own calls would wait for that thread
        # forever. In a separate context they have a separate thread.
        self._context = Context()
        self._context.run(running.set, running.get())
        self._scope: Any = ThreadSensitiveContext()  # which has no types

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop, and wait for it."""
        return self._begin(coroutine).result()

    @property
    def free(self) -> int:
        """The number of handlers that may be started now."""
        return self.concurrency - len(self._under_way)

    @property
    def rows_under_way(self) -> list[Any]:
        """The keys of all rows that ``process_batch()`` is handling now."""
        return [pk for rows in self._under_way.values() for pk in rows]

    def start(
        self,
        processor: Definition[Any],
        pk: Any,
        given: Any,
        arguments: tuple[Any, ...],
        *,
        is_taken_over: bool = False,
    ) -> None:
        """Start a handler, after ``taken_over()`` if so; there must be room for it.

        ``given``: the row with this key, or for ``process_batch()`` several rows by key, of which
        this is the first one's.
        """
        self._under_way[pk] = given
        self._begin(self._execute(processor, pk, given, arguments, is_taken_over=is_taken_over))

    def wait(self) -> None:
        """Wait until there is an outcome that is not forgotten yet."""
        if not self._outcomes:
            self._take(wait=True)

    def ended(self, pks: Iterable[Any]) -> dict[Any, Together]:
        """Return the outcomes of those handlers that have ended, until they are forgotten.

        When no outcome is left, raises an error that is no row's failure, and so ends the run.
        """
        self._take(wait=False)
        found = {pk: self._outcomes[pk] for pk in pks if pk in self._outcomes}
        outcomes = {pk: each for pk, each in found.items() if not isinstance(each, BaseException)}
        raised = [each for each in found.values() if isinstance(each, BaseException)]
        if raised and not outcomes:
            raise raised[0]
        return outcomes

    def forget(self, pks: Iterable[Any]) -> None:
        """Forget these outcomes, which the caller has recorded."""
        for pk in pks:
            del self._outcomes[pk]

    def give_up(self) -> None:
        """Cancel all handlers, and wait for none."""

        async def all_of_them() -> None:
            self._cancel_once(list(self._handlers))

        if self._loop is not None:
            self.call(all_of_them())

    def cancel(self, pks: Iterable[Any]) -> dict[Any, Together]:
        """Cancel these handlers, wait for them, and return the outcomes of those that ended."""
        pks = list(pks)
        if self._loop is not None:
            self.call(self._cancel(pks))
        self._take(wait=False)
        for pk in pks:
            self._under_way.pop(pk, None)
        outcomes = {pk: self._outcomes.pop(pk) for pk in pks if pk in self._outcomes}
        return {pk: each for pk, each in outcomes.items() if not isinstance(each, BaseException)}

    def _take(self, *, wait: bool) -> None:
        with suppress(Empty):
            self._note(*self._ended.get(block=wait))
            while True:
                self._note(*self._ended.get_nowait())

    def _note(self, pk: Any, outcome: Together | BaseException) -> None:
        self._outcomes[pk] = outcome
        self._under_way.pop(pk, None)

    def close(self) -> None:
        """End the loop and its threads, and close the connections that handlers opened."""
        if self._loop is None or self._thread is None:
            return
        loop, self._loop = self._loop, None
        asyncio.run_coroutine_threadsafe(self._end(loop), loop).result()
        self._closing.set()
        loop.call_soon_threadsafe(loop.stop)
        self._thread.join()
        loop.close()

    async def _execute(
        self,
        processor: Definition[Any],
        pk: Any,
        given: Any,
        arguments: tuple[Any, ...],
        *,
        is_taken_over: bool,
    ) -> None:
        outcome: Together | BaseException
        task = asyncio.current_task()
        assert task is not None
        self._handlers[pk] = task
        try:
            if is_taken_over:
                prepared = processor.taken_over(given)
                if inspect.isawaitable(prepared):
                    await prepared
            if processor._handles_batches:
                results: Any = processor.process_batch([*given.values()], *arguments)
                outcome = understood(processor, given, await results)
            else:
                outcome = Handled(await processor.process(given, *arguments))
        except BaseException as error:  # noqa: BLE001  # whatever a handler raises is its row's failure
            if isinstance(error, asyncio.CancelledError) and pk in self._given_up:
                return  # interrupted: neither done nor failed
            outcome = error if ends_the_run(error) else judge(error)
        finally:
            del self._handlers[pk]
        self._ended.put((pk, outcome))

    def _begin(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        loop = self._started()  # which sets up the context
        return self._context.copy().run(asyncio.run_coroutine_threadsafe, coroutine, loop)

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            name = f"{self._label}: handlers"
            ready = threading.Event()
            arguments = (self._loop, ready)
            self._thread = threading.Thread(
                target=self._serve, args=arguments, name=name, daemon=True
            )
            self._thread.start()
            ready.wait()
        return self._loop

    def _serve(self, loop: asyncio.AbstractEventLoop, ready: threading.Event) -> None:
        asyncio.set_event_loop(loop)
        enter = self._scope.__aenter__()
        loop.run_until_complete(loop.create_task(enter, context=self._context))
        loop.call_soon(ready.set)
        while not self._closing.is_set():
            # asyncio also raises a task's SystemExit out of the loop, and a handler may stop the
            # loop. The loop goes on, so that the other handlers can end.
            with suppress(BaseException):
                loop.run_forever()

    async def _end(self, loop: asyncio.AbstractEventLoop) -> None:
        async def leave() -> None:
            await sync_to_async(connections.close_all)()
            await self._scope.__aexit__(None, None, None)

        await _wait_for(_cancelled(asyncio.all_tasks() - {asyncio.current_task()}))
        await loop.create_task(leave(), context=self._context)
        await loop.shutdown_asyncgens()
        await loop.shutdown_default_executor()

    async def _cancel(self, pks: Sequence[Any]) -> None:
        # All handlers that were started before this have reached their first step.
        handlers = [self._handlers[pk] for pk in pks if pk in self._handlers]
        self._cancel_once(pks)
        await _wait_for(handlers)
        self._given_up.difference_update(pks)

    def _cancel_once(self, pks: Iterable[Any]) -> None:
        for pk in pks:
            # A second cancellation would interrupt a handler that cleans up after the first.
            if pk in self._handlers and pk not in self._given_up:
                self._given_up.add(pk)
                self._handlers[pk].cancel()


def _refuse_green_threads(label: str) -> None:
    """Raise if threads are greenlets, because the loop would share its thread with the run.

    The libraries are looked up by name, since only a process that imported one can be patched.
    """
    for module, asked, what in (
        ("gevent.monkey", "is_module_patched", "threading"),
        ("eventlet.patcher", "is_monkey_patched", "thread"),
    ):
        if module in sys.modules and getattr(sys.modules[module], asked)(what):
            raise Unsupported(
                f"{label}: expected real threads for an asynchronous handler, whose event loop "
                f"needs one, got threads patched by {module.partition('.')[0]}; write 'def' "
                "and use concurrency, or run it in a process that is not patched."
            )


def _cancelled(tasks: Iterable[asyncio.Task[Any] | None]) -> list[asyncio.Task[Any]]:
    own = [task for task in tasks if task is not None]
    for task in own:
        task.cancel()
    return own


async def _wait_for(tasks: Iterable[asyncio.Task[Any] | None]) -> None:
    own = [task for task in tasks if task is not None]
    if own:
        await asyncio.wait(own, timeout=CANCEL_WITHIN)
