"""Asynchronous handlers: several at once on one event loop, in a thread beside the run's own.

The run's thread keeps the database connection: it claims and settles, while the loop's thread
only waits for the outside world.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from contextvars import Context
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from asgiref.sync import ThreadSensitiveContext, sync_to_async
from django.db import connections

from .handler import Failed, Handled, Outcome, ends_the_run, judge

if TYPE_CHECKING:
    from dcl_processor.definition.definition import Definition

T = TypeVar("T")

#: Seconds that handlers have to end in after they were cancelled.
CANCEL_WITHIN = 10.0


class EventLoop:
    """An event loop in a thread of its own, for one run."""

    def __init__(self, label: str, concurrency: int) -> None:
        self._label = label
        self._concurrency = concurrency
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._ended: SimpleQueue[tuple[Any, Outcome | BaseException]] = SimpleQueue()
        # Kept until the caller comes back for more: an interrupt may come before it has them.
        self._taken: list[tuple[Any, Outcome | BaseException]] = []
        self._handlers: set[asyncio.Task[Any] | None] = set()
        self._cancelling = False
        # Not the caller's: an async view that waits for the run lends its only thread for
        # database calls to the run itself, and the handlers' own calls would wait for that thread
        # for ever. In a context of their own they have a thread of their own.
        self._context = Context()
        self._scope: Any = ThreadSensitiveContext()  # which has no types

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop, and wait for it."""
        return self._begin(coroutine).result()

    def handle(
        self,
        processor: Definition[Any],
        rows: Iterable[tuple[Any, Any]],
        arguments: Callable[[], tuple[Any, ...]],
    ) -> Iterator[list[tuple[Any, Outcome]]]:
        """Handle rows, ``concurrency`` at a time; yield keys and outcomes as they come.

        Those that ended while the caller was busy come together.

        ``rows`` is asked for the next row when a handler may start. When the caller gives up, the
        handlers under way are cancelled, and waited for; ``ended()`` has those that came to an
        end all the same.
        """
        coming = iter(rows)
        under_way: dict[Any, Future[None]] = {}
        try:
            while True:
                while len(under_way) < self._concurrency and (row := next(coming, None)):
                    pk, instance = row
                    work = self._execute(processor, pk, instance, arguments())
                    under_way[pk] = self._begin(work)
                if not under_way:
                    return
                self._take(wait=True)
                for pk, _ in self._taken:
                    del under_way[pk]
                raised = [each for _, each in self._taken if isinstance(each, BaseException)]
                if outcomes := list(_outcomes(self._taken)):
                    yield outcomes
                self._taken.clear()
                if raised:
                    raise raised[0]
        finally:
            if under_way:
                self._cancel(under_way.values())

    def ended(self) -> Iterator[tuple[Any, Outcome]]:
        """Yield what ended and was not asked for any more, or given last."""
        self._take(wait=False)
        yield from _outcomes(self._taken)
        self._taken.clear()

    def _take(self, *, wait: bool) -> None:
        with suppress(Empty):
            self._taken.append(self._ended.get(block=wait))
            while True:
                self._taken.append(self._ended.get_nowait())

    def close(self) -> None:
        """End the loop and its threads, and close the connections that handlers opened."""
        if self._loop is None or self._thread is None:
            return
        loop, self._loop = self._loop, None
        asyncio.run_coroutine_threadsafe(self._end(loop), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        self._thread.join()
        loop.close()

    async def _execute(
        self, processor: Definition[Any], pk: Any, row: Any, arguments: tuple[Any, ...]
    ) -> None:
        outcome: Outcome | BaseException
        task = asyncio.current_task()
        self._handlers.add(task)
        try:
            outcome = Handled(await processor.process(row, *arguments))
        except asyncio.CancelledError as error:
            if self._cancelling:
                return  # interrupted: neither done nor failed
            cancelled = CancelledError("the handler was cancelled, and not by the run")
            cancelled.__cause__ = error
            outcome = Failed(cancelled)
        except Exception as error:  # noqa: BLE001  # whatever a handler raises is its row's failure
            outcome = error if ends_the_run(error) else judge(error)
        except BaseException as error:  # noqa: BLE001  # SystemExit and its like: for the run's thread
            outcome = error
        finally:
            self._handlers.discard(task)
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
        loop.run_forever()

    async def _end(self, loop: asyncio.AbstractEventLoop) -> None:
        async def leave() -> None:
            await sync_to_async(connections.close_all)()
            await self._scope.__aexit__(None, None, None)

        await _wait_for(_cancelled(asyncio.all_tasks() - {asyncio.current_task()}))
        await loop.create_task(leave(), context=self._context)
        await loop.shutdown_asyncgens()
        await loop.shutdown_default_executor()

    def _cancel(self, under_way: Iterable[Future[None]]) -> None:
        async def all_ended() -> None:
            await _wait_for(self._handlers)

        self._cancelling = True
        try:
            for future in under_way:
                future.cancel()
            self.call(all_ended())
        finally:
            self._cancelling = False


def _outcomes(
    ended: Iterable[tuple[Any, Outcome | BaseException]],
) -> Iterator[tuple[Any, Outcome]]:
    for pk, outcome in ended:
        if not isinstance(outcome, BaseException):
            yield pk, outcome


def _cancelled(tasks: Iterable[asyncio.Task[Any] | None]) -> list[asyncio.Task[Any]]:
    own = [task for task in tasks if task is not None]
    for task in own:
        task.cancel()
    return own


async def _wait_for(tasks: Iterable[asyncio.Task[Any] | None]) -> None:
    own = [task for task in tasks if task is not None]
    if own:
        await asyncio.wait(own, timeout=CANCEL_WITHIN)
