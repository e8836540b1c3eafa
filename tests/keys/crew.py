"""Workers, each in a process of its own, which stay for all rounds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from tests.waiting import PATIENCE, Late

_spawn = get_context("spawn")

#: The part of the rows that is in the hot key.
SKEWS = {"skewed": 0.9, "even": 0.0}


@dataclass(frozen=True)
class Round:
    delivery: str
    skew: str
    mode: str


class Crew:
    """Workers, each in a process of its own."""

    def __init__(self, workers: int) -> None:
        self._pipes: list[Connection] = []
        self._processes = []
        for number in range(workers):
            ours, theirs = _spawn.Pipe()
            process = _spawn.Process(target=_work, args=(theirs, number), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        for pipe in self._pipes:
            self._hear(pipe)

    def begin(self, of: Round, work: float) -> None:
        for pipe in self._pipes:
            pipe.send((of, work))

    def end(self) -> list[Any]:
        """Let the workers end their round; return what each reports."""
        for pipe in self._pipes:
            pipe.send("over")
        return [self._hear(pipe) for pipe in self._pipes]

    def dismiss(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(PATIENCE)
            if process.is_alive():
                process.kill()

    @staticmethod
    def _hear(pipe: Connection) -> Any:
        if not pipe.poll(PATIENCE):
            raise Late("a worker's answer")
        answer = pipe.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer


def _work(pipe: Connection, number: int) -> None:
    import django

    django.setup()
    from django.db import connection

    from . import processors

    processors.install()
    connection.ensure_connection()
    pipe.send("ready")
    while True:
        try:
            of, work = pipe.recv()
        except EOFError:
            return
        try:
            processor = processors.processor(of.delivery, of.mode, work)
            # One worker's first run is about some rows only, and must not pass those it leaves out.
            chosen = processors.filtered(number)
            reports = []
            while not pipe.poll(0.01):
                reports.append(processor(filter=chosen, wait_for_locked=0.2))
                chosen = None
            pipe.recv()
            pipe.send([(each.processed, each.failed, each.held) for each in reports])
        except EOFError:
            return  # the parent has failed
        except Exception as error:  # noqa: BLE001  # raised again in the parent
            pipe.send(error)


@contextmanager
def crew_of(workers: int) -> Iterator[Crew]:
    crew = Crew(workers)
    try:
        yield crew
    finally:
        crew.dismiss()
