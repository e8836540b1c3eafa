"""Asynchronous handlers: several at once on one event loop, in a thread beside the run's own.

The run's thread keeps the database connection: it claims and settles, while the loop's thread
only waits for the outside world.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from typing import TYPE_CHECKING, Any, TypeVar

from .execution import Failed, Handled, Outcome, judge

if TYPE_CHECKING:
    from .definition import BatchProcessor

T = TypeVar("T")

#: Seconds that handlers have to end in after they were cancelled.
CANCEL_WITHIN = 10.0


class EventLoop:
    """An event loop in a thread of its own, for one run."""

    def __init__(self, label: str, concurrency: int) -> None:
        self._label = label
        self._concurrency = concurrency
        self._loop: asyncio.AbstractEventLoop | None = None

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop, and wait for it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._started()).result()

    def handle(
        self,
        processor: BatchProcessor[Any],
        rows: Iterable[tuple[Any, Any]],
        arguments: Callable[[], tuple[Any, ...]],
    ) -> Iterator[tuple[Any, Outcome]]:
        """Handle rows, ``concurrency`` at a time; yield each key and outcome when it is there.

        ``rows`` is asked for the next row when a handler may start. When the caller gives up, the
        handlers under way are cancelled, and waited for.
        """
        coming = iter(rows)
        under_way: dict[Future[Outcome], Any] = {}
        try:
            while True:
                while len(under_way) < self._concurrency and (row := next(coming, None)):
                    coroutine = _execute(processor, row[1], arguments())
                    future = asyncio.run_coroutine_threadsafe(coroutine, self._started())
                    under_way[future] = row[0]
                if not under_way:
                    return
                ended, _ = wait(under_way, return_when=FIRST_COMPLETED)
                for future in ended:
                    yield under_way.pop(future), _outcome(future)
        finally:
            for future in under_way:
                future.cancel()
            if under_way and self._loop is not None:
                self._settle_down()

    def close(self) -> None:
        """End the loop and its thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._loop = None

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            name = f"{self._label}: handlers"
            self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
            self._thread.start()
        return self._loop

    def _settle_down(self) -> None:
        async def all_ended() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            if others:
                await asyncio.wait(others, timeout=CANCEL_WITHIN)

        self.call(all_ended())


async def _execute(processor: BatchProcessor[Any], row: Any, arguments: tuple[Any, ...]) -> Outcome:
    try:
        return Handled(await processor.process(row, *arguments))
    except Exception as error:  # noqa: BLE001  # whatever a handler raises is its row's failure
        return judge(error)


def _outcome(future: Future[Outcome]) -> Outcome:
    try:
        return future.result()
    except CancelledError as error:
        return Failed(error)  # the handler cancelled itself
