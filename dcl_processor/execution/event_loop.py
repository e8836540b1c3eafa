"""Asynchronous handlers: several at once on one event loop, in a thread beside the run's own.

The run's thread keeps the database connection: it claims and settles, while the loop's thread
only waits for the outside world.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import sys
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from contextvars import Context, ContextVar
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from asgiref.sync import ThreadSensitiveContext, sync_to_async
from django.conf import settings
from django.db import connections
from django.utils import timezone, translation

from dcl_processor import observers
from dcl_processor import steady as time
from dcl_processor.exceptions import HandlerTimeout, Unsupported
from dcl_processor.execution.handler import Failed, Outcome, as_exception, judge, returned
from dcl_processor.interrupts import ends_the_run, wait_for_next
from dcl_processor.log_fields import running as running_now
from dcl_processor.outcomes import returned_error
from dcl_processor.signals import row_started

from . import calls
from .calls import Call, entered_now
from .leftover import SharedSessions, without_work

if TYPE_CHECKING:
    from dcl_processor.definition.definition import Definition

T = TypeVar("T")
Ended = Outcome | BaseException

#: Seconds that handlers have to end in after they were cancelled.
CANCEL_WITHIN = 10.0

#: The call to which the code of a task belongs, also in the tasks that a handler starts.
_call_now: ContextVar[Call] = ContextVar("_call_now")


class EventLoop:
    """An event loop in a thread of its own, for one run.

    ``seconds``: that each handler may take, if they are limited.
    """

    def __init__(self, label: str, concurrency: int, seconds: float | None = None) -> None:
        what = "an asynchronous handler, whose event loop needs one"
        refuse_green_threads(label, what, "write 'def' and use concurrency")
        self._label = label
        self.seconds = seconds
        self.concurrency = concurrency
        self._loop: asyncio.AbstractEventLoop | None = None
        name = f"{label}: handlers"
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._ready = threading.Event()
        self._closing = threading.Event()
        # The keys of the rows that handlers were given, until forget() is called.
        self._given: set[Any] = set()
        # Race: work without flip. The outcomes of those that ended, by their keys, written by the
        # loop's thread where the run's thread finds them: an interrupt of the run loses what
        # it has just taken out of a queue. The queue only wakes it.
        self._outcomes: dict[Any, Ended] = {}
        self._ended: SimpleQueue[None] = SimpleQueue()
        # The limits of the calls under way, and the calls by their tasks, which the monitor reads.
        self._scopes: dict[Call, asyncio.Timeout] = {}
        self._calls: dict[asyncio.Task[Any], Call] = {}
        # Used by the loop's thread alone.
        self._handlers: dict[Any, asyncio.Task[Any]] = {}
        self._given_up: set[Any] = set()
        # Not the caller's context: an async view that waits for the run lends its only thread for
        # database calls to the run itself, and the handlers' own calls would wait for that thread
        # forever. In a separate context they have a separate thread.
        self._context = Context()
        self._context.run(entered_now.set, entered_now.get())
        language = translation.get_language() or settings.LANGUAGE_CODE
        self._zone, self._language = timezone.get_current_timezone(), language
        self._scope: Any = ThreadSensitiveContext()  # which has no types
        self.sessions = SharedSessions()
        self._context.run(self.sessions.watch)

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop, and wait for it."""
        return self._begin(coroutine).result()

    @property
    def free(self) -> int:
        """The number of handlers that may be started now.

        The place of one that has ended is free when its outcome was looked at: it may end the run.
        """
        return self.concurrency - len(self._given)

    @property
    def rows_under_way(self) -> list[Any]:
        """The keys of all rows that are being handled now."""
        return [pk for pk in self._given if pk not in self._outcomes]

    def start(
        self,
        processor: Definition[Any],
        pk: Any,
        row: Any,
        arguments: tuple[Any, ...],
        *,
        attempt: int | None = None,
    ) -> None:
        """Start a handler; there must be room for it.

        ``attempt``: its number, if one is counted.
        """
        self._given.add(pk)
        call = partial(self._outcome, processor, pk, row, arguments, attempt=attempt)
        self._begin(self._execute(pk, call)).add_done_callback(partial(self._over, pk))

    def _over(self, pk: Any, task: Future[None]) -> None:
        """Take note of a task that another one has cancelled, or a thread's error has ended."""
        if pk in self._outcomes or pk in self._given_up or pk not in self._given:
            return
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None:
            self._outcomes[pk] = Failed(as_exception(error))
            self._ended.put(None)

    def wait(self, timeout: float | None) -> bool:
        """Wait until there is an outcome that is not forgotten yet, or for ``timeout`` seconds.

        Returns whether there is one.
        """
        end = math.inf if timeout is None else time.monotonic() + timeout
        with suppress(Empty):
            # It may be woken for outcomes that are forgotten already.
            while not self._outcomes:
                left = None if timeout is None else max(0.0, end - time.monotonic())
                wait_for_next(self._ended, left)
        return bool(self._outcomes)

    def ended(self, pks: Iterable[Any]) -> dict[Any, Outcome]:
        """Return the outcomes of those handlers that have ended, until they are forgotten.

        When no outcome is left, raises an error that is no row's failure, and so ends the run.
        """
        found = {pk: self._outcomes[pk] for pk in pks if pk in self._outcomes}
        outcomes = {pk: each for pk, each in found.items() if not isinstance(each, BaseException)}
        raised = [each for each in found.values() if isinstance(each, BaseException)]
        if raised and not outcomes:
            raise raised[0]
        return outcomes

    def forget(self, pks: Iterable[Any]) -> None:
        """Forget these outcomes, which the caller has recorded."""
        for pk in pks:
            self._given.discard(pk)
            self._outcomes.pop(pk, None)

    def is_held_up(self, call: Call) -> bool:
        """Return whether the call was not cancelled because another one blocks the loop.

        May be called in any thread.
        """
        scope = self._scopes.get(call)
        if scope is None or scope.expired():
            return False
        at_step = self._at_step()
        # What a handler left behind may block the loop as well, and is not ended by its limit.
        return at_step is not call and at_step in self._scopes

    def _at_step(self) -> Call | None:
        """Return the call whose code the loop is executing, if that is known."""
        task = None if self._loop is None else asyncio.current_task(self._loop)
        if task is None:
            return None
        found = self._calls.get(task)
        # A task that a handler has started has a copy of its context, which 3.11 does not show.
        context = getattr(task, "get_context", None)
        if found is None and context is not None:
            found = context().get(_call_now)
        return found

    def give_up(self) -> None:
        """Cancel all handlers, and wait for none."""
        if self._is_running:
            self.call(self._cancel([*self._given], waits=False))

    def cancel(self, pks: Iterable[Any]) -> dict[Any, Outcome]:
        """Cancel these handlers, wait for them, and return the outcomes of those that ended."""
        pks = [*pks]
        if self._is_running:
            self.call(self._cancel(pks, waits=True))
        outcomes = {pk: self._outcomes[pk] for pk in pks if pk in self._outcomes}
        self.forget(pks)
        return {pk: each for pk, each in outcomes.items() if not isinstance(each, BaseException)}

    @property
    def _is_running(self) -> bool:
        # Race: work without flip. An interrupt may come before the thread is started; what was
        # then sent to the loop would be waited for without end.
        return self._thread.is_alive()

    def close(self) -> None:
        """End the loop and its threads, and close the connections that handlers opened."""
        if self._loop is None:
            return
        loop, self._loop = self._loop, None
        if self._is_running:
            asyncio.run_coroutine_threadsafe(self._end(loop), loop).result()
            self._closing.set()
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join()
        loop.close()

    async def _execute(self, pk: Any, call: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._handlers[pk] = task
        try:
            outcome = await call()
            # The work in the thread may go on behind the limit.
            error = outcome.error if isinstance(outcome, Failed) else None
            if outcome is not None and not isinstance(error, HandlerTimeout):
                outcome = await self._judged(pk, outcome)
        finally:
            del self._handlers[pk]
        if outcome is not None:
            self._outcomes[pk] = outcome
            self._ended.put(None)

    async def _judged(self, pk: Any, outcome: Ended) -> Ended | None:
        """Return the outcome with what is known of the transaction; ``None``: interrupted."""
        try:
            is_lost = await self.sessions.were_left_open(pk, self._handlers.keys())
            await self.sessions.renew()
        except asyncio.CancelledError:
            return None if pk in self._given_up else outcome
        if is_lost and not isinstance(outcome, BaseException):
            return without_work(outcome, shared=True)
        return outcome

    async def _outcome(
        self,
        processor: Definition[Any],
        pk: Any,
        row: Any,
        arguments: tuple[Any, ...],
        *,
        attempt: int | None,
    ) -> Ended | None:
        """Call the handler; return what it came to, or ``None`` if it was interrupted."""
        call = Call(self._label, [pk], self, attempt)
        try:
            result = await self._handle(processor, call, processor.process, row, *arguments)
            return returned(result, call.duration)
        except BaseException as error:  # noqa: BLE001  # whatever a handler raises is its row's failure
            if isinstance(error, asyncio.CancelledError) and pk in self._given_up:
                return None  # interrupted: neither done nor failed
            return error if ends_the_run(error) else judge(error, duration=call.duration)

    async def _handle(
        self, processor: Definition[Any], call: Call, handler: Callable[..., Any], *given: Any
    ) -> Any:
        """Call a handler as ``_call()`` does; the observers and the receivers learn of it."""
        handling = observers.Handling(call, running_now.get())
        try:
            if observers.active or row_started.receivers:
                try:
                    await self._call(call, _announce, processor, handling)
                finally:
                    call.duration = None
            call.since = time.monotonic()
            result = await self._call(call, handler, *given)
        except BaseException as error:
            observers.tell("handler_ended", handling, error)
            raise
        returned = returned_error(result)
        observers.tell("handler_ended", handling, returned)
        return result

    async def _call(self, call: Call, handler: Callable[..., Any], *given: Any) -> Any:
        """Call a handler, and cancel it at the limit; raise ``HandlerTimeout`` then."""
        calls.begin(call)
        scope = asyncio.timeout(self.seconds)
        task = asyncio.current_task()
        assert task is not None
        self._scopes[call] = scope
        self._calls[task] = call
        _call_now.set(call)
        error: BaseException | None = None
        try:
            async with scope:
                result = handler(*given)
                return await result if inspect.isawaitable(result) else result
        except BaseException as raised:
            error = raised
            raise
        finally:
            calls.end(call)
            del self._scopes[call], self._calls[task]
            # A cancelled handler may have done half of its work, whatever it returns or raises.
            cancelled = isinstance(error, asyncio.CancelledError)  # for another reason, too
            if scope.expired() and not cancelled and not (error and ends_the_run(error)):
                assert self.seconds is not None
                raise HandlerTimeout(self.seconds) from error

    def _begin(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        loop = self._started()  # which sets up the context
        context = self._context.copy()
        context.run(running_now.set, running_now.get())
        return context.run(asyncio.run_coroutine_threadsafe, coroutine, loop)

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            with suppress(AttributeError):  # of a loop that is not Python's own
                self._loop.time = time.monotonic  # type: ignore[method-assign]  # as it goes on
            self._thread.start()
            self._ready.wait()
        return self._loop

    def _serve(self) -> None:
        loop = self._loop
        assert loop is not None
        asyncio.set_event_loop(loop)
        # Here, because Django keeps them for each thread.
        self._context.run(timezone.activate, self._zone)
        self._context.run(translation.activate, self._language)
        enter = self._scope.__aenter__()
        loop.run_until_complete(loop.create_task(enter, context=self._context))
        loop.call_soon(self._ready.set)
        while not self._closing.is_set():
            # asyncio also raises a task's SystemExit out of the loop, and a handler may stop the
            # loop. The loop goes on, so that the other handlers can end.
            with suppress(BaseException):
                loop.run_forever()

    async def _end(self, loop: asyncio.AbstractEventLoop) -> None:
        async def leave() -> None:
            await sync_to_async(connections.close_all)()
            await self._scope.__aexit__(None, None, None)

        others = [each for each in asyncio.all_tasks() if each is not asyncio.current_task()]
        for each in others:
            each.cancel()
        await _wait_for(others)
        # Work that a handler has given to another thread goes on after the handler was cancelled.
        await _wait_for([loop.create_task(leave(), context=self._context)])
        await loop.shutdown_asyncgens()
        await _wait_for([loop.create_task(loop.shutdown_default_executor())])

    async def _cancel(self, pks: Sequence[Any], *, waits: bool) -> None:
        # All handlers that were started before this have reached their first step.
        handlers = {pk: self._handlers[pk] for pk in pks if pk in self._handlers}
        for pk, task in handlers.items():
            # A second cancellation would interrupt a handler that cleans up after the first.
            if pk not in self._given_up:
                self._given_up.add(pk)
                task.cancel()
        if waits:
            await _wait_for([*handlers.values()])
            self._given_up.difference_update(pks)


async def _announce(processor: Definition[Any], handling: observers.Handling) -> None:
    if row_started.receivers:
        for sent in calls.starts(processor, handling.call):
            # Receivers that are no coroutines are called in the thread for database calls.
            await row_started.asend_robust(**sent)
    observers.tell("handler_started", handling)


async def _wait_for(tasks: Sequence[asyncio.Task[Any]]) -> None:
    if tasks:
        await asyncio.wait(tasks, timeout=CANCEL_WITHIN)


def refuse_green_threads(label: str, what: str, fix: str) -> None:
    """Raise if gevent has replaced threads by greenlets, which share one thread.

    ``what``: needs real threads; ``fix``: does without. Only a process that has imported gevent can
    be patched.
    """
    patched = sys.modules.get("gevent.monkey")
    if patched is not None and patched.is_module_patched("threading"):
        raise Unsupported(
            f"{label}: expected real threads for {what}, got threads patched by gevent; {fix}, or "
            "run it in a process that is not patched."
        )
