"""Copies of a processor in processes of their own, which take part in one race after another."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from django.db import connections

from tests.waiting import PATIENCE, Late

_spawn = multiprocessing.get_context("spawn")


@dataclass
class Copies:
    """Processes that wait at a barrier for each race, and tell which rows they handled."""

    number: int
    pipes: list[Connection] = field(default_factory=list)

    def race(self, name: str) -> list[list[Any]]:
        """Run the named function of ``tests.race.processors`` in all workers at once.

        Returns, for each copy, the primary keys that its handler was called with.
        """
        for pipe in self.pipes:
            pipe.send(name)
        handled = []
        for pipe in self.pipes:
            if not pipe.poll(PATIENCE):
                raise Late("the end of a copy's race")
            answer = pipe.recv()
            if isinstance(answer, str):
                raise AssertionError(answer)  # noqa: TRY004  # a copy's own finding
            handled.append(answer)
        return handled


@contextmanager
def workers(number: int) -> Iterator[Copies]:
    """Start the processes, connected to this process's test database; end them when left."""
    names = {alias: connections[alias].settings_dict["NAME"] for alias in connections}
    barrier = _spawn.Barrier(number)
    team = Copies(number)
    processes = []
    for seed in range(number):
        ours, theirs = _spawn.Pipe()
        process = _spawn.Process(target=_copy, args=(theirs, barrier, names, seed), daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        team.pipes.append(ours)
    try:
        yield team
    finally:
        for pipe in team.pipes:
            pipe.send(None)
        for process in processes:
            process.join(PATIENCE)
            if process.is_alive():
                process.kill()


def _copy(pipe: Connection, barrier: Any, names: dict[str, Any], seed: int) -> None:
    import django

    django.setup()
    for alias, name in names.items():
        connections[alias].settings_dict["NAME"] = name
    from tests.race import processors

    chance = random.Random(seed)  # noqa: S311  # delays, not secrets
    while name := pipe.recv():
        handled: list[Any] = []

        def handle(row: Any, handled: list[Any] = handled) -> None:
            handled.append(row.pk)
            time.sleep(chance.uniform(0, 0.002))

        processor = getattr(processors, name)(handle)
        barrier.wait(PATIENCE)
        report = processor(wait_for_locked=PATIENCE)
        agreed = (report.processed, report.failed, report.skipped) == (len(handled), 0, 0)
        pipe.send(handled if agreed else f"{len(handled)} handler calls, but {report}")
    connections.close_all()
