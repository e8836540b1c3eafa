"""Copies in processes of their own, which stay for the whole run of the benchmarks."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.waiting import PATIENCE

_spawn = multiprocessing.get_context("spawn")

#: Seconds for one measurement, of which some take minutes; after that it counts as hanging.
ENDS_WITHIN = 5 * PATIENCE


@dataclass(frozen=True, slots=True)
class Order:
    """What a copy has to do.

    ``host``: the server, or a proxy before it. ``delay``: seconds that the handler takes.
    """

    contender: str
    host: str
    log: Path
    delay: float


@dataclass(frozen=True, slots=True)
class Share:
    """What one copy did, by the machine's clock.

    ``cpu``: seconds of a processor that its own code took.
    """

    began: float
    ended: float
    seconds: float | None
    cpu: float


class WorkerFailedError(Exception):
    """A contender raised, or did not come to an end."""


class Team:
    """As many processes as the largest order so far has asked for."""

    def __init__(self) -> None:
        self._members: list[tuple[Any, Connection]] = []

    def drain(
        self, order: Order, processes: int, at_start: Callable[[], object] | None = None
    ) -> list[Share]:
        """Let so many processes drain together; all are ready when the first begins.

        ``at_start`` is called when all are ready.
        """
        while len(self._members) < processes:
            self._members.append(_start())
        pipes = [pipe for _, pipe in self._members[:processes]]
        for pipe in pipes:
            pipe.send(order)
        for pipe in pipes:
            _hear(pipe, order)
        if at_start:
            at_start()
        for pipe in pipes:
            pipe.send("go")
        return [_hear(pipe, order) for pipe in pipes]

    def dismiss(self) -> None:
        for _, pipe in self._members:
            pipe.close()
        for process, _ in self._members:
            process.join(PATIENCE)
            if process.is_alive():
                process.kill()
        self._members.clear()


@contextmanager
def team() -> Iterator[Team]:
    members = Team()
    try:
        yield members
    finally:
        members.dismiss()


def _start() -> tuple[Any, Connection]:
    ours, theirs = _spawn.Pipe()
    process = _spawn.Process(target=_copy, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _hear(pipe: Connection, order: Order) -> Any:
    if not pipe.poll(ENDS_WITHIN):
        raise WorkerFailedError(f"{order.contender}: expected an end within {ENDS_WITHIN:.0f} s.")
    try:
        answer = pipe.recv()
    except EOFError:
        raise WorkerFailedError(f"{order.contender}: a copy died.") from None
    if isinstance(answer, BaseException):
        raise WorkerFailedError(f"{order.contender}: {answer}")
    return answer


def _copy(pipe: Connection) -> None:
    import django

    django.setup()
    while True:
        try:
            order = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(_drain(pipe, order))
        except Exception:  # noqa: BLE001  # the parent says it, and ends the run
            pipe.send(WorkerFailedError(traceback.format_exc()))


def _drain(pipe: Connection, order: Order) -> Share:
    from django.db import connection

    from . import handling
    from .contenders import CONTENDERS

    drain = CONTENDERS[order.contender].drainer()
    if connection.settings_dict["HOST"] != order.host:
        connection.close()
        connection.settings_dict["HOST"] = order.host
    # To connect costs every contender but once, as a worker that lives on would see it.
    connection.ensure_connection()
    close = handling.open_log(order.log, order.delay)
    try:
        pipe.send("ready")
        pipe.recv()
        began, cpu = time.monotonic(), time.process_time()
        drained = drain()
        ended, cpu = time.monotonic(), time.process_time() - cpu
    finally:
        close()
    return Share(began, ended, drained.seconds, cpu)
