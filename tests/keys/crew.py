"""Workers, each in a process of its own, which stay for all rounds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any

from tests.waiting import PATIENCE

_spawn = get_context("spawn")
#: Whether the round is over, in a worker.
_over: list[Any] = []


class Crew:
    """Workers that handle rows from ``begin()`` to ``end()``."""

    def __init__(self, workers: int, pool: Any, over: Any) -> None:
        self._workers, self._pool, self._over = workers, pool, over
        self._failed: Any = None

    def begin(self, delivery: str, mode: str) -> None:
        self._over.clear()
        tasks = [(delivery, mode, number) for number in range(self._workers)]
        self._failed = self._pool.starmap_async(_work, tasks, chunksize=1)

    def end(self) -> int:
        """Let the workers end their round; return how many rows have failed."""
        self._over.set()
        return sum(self._failed.get(PATIENCE))


@contextmanager
def crew_of(workers: int) -> Iterator[Crew]:
    over = _spawn.Event()
    with _spawn.Pool(workers, _get_ready, (over,)) as pool:
        yield Crew(workers, pool, over)


def _get_ready(over: Any) -> None:
    import django

    django.setup()
    from . import processors

    processors.install()
    _over.append(over)


def _work(delivery: str, mode: str, number: int) -> int:
    from . import processors

    processor = processors.processor(delivery, mode)
    # One worker's first run is about some rows only, and must not pass those it leaves out.
    chosen = processors.filtered(number)
    failed = 0
    while not _over[0].wait(0.01):
        failed += processor(filter=chosen, wait_for_locked=0.2).failed
        chosen = None
    return failed
