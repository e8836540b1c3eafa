"""The one handler that every contender calls, and the log in which each call is a line.

The log is a file that is only appended to: one write for each call, by any caller, which no
transaction can take back and no process can lose when it is killed.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

#: Handle the row of that key; set anew by ``open_log()`` in each copy and for each measurement.
handle: Callable[[int], None]
#: The same for asynchronous handlers.
handle_soon: Callable[[int], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Call:
    """One line: which row was handled, and when by the machine's clock."""

    pk: int
    nanoseconds: int


def open_log(path: Path, delay: float) -> Callable[[], None]:
    """Make ``handle`` take so many seconds and then note its call; return what closes the log."""
    global handle, handle_soon  # the contenders know nothing of logs
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    clock, write, sleep = time.monotonic_ns, os.write, time.sleep

    def no_op(pk: int) -> None:
        write(log, b"%d %d\n" % (pk, clock()))

    def slow(pk: int) -> None:
        sleep(delay)
        no_op(pk)

    async def soon(pk: int) -> None:
        if delay:
            await asyncio.sleep(delay)
        no_op(pk)

    handle, handle_soon = slow if delay else no_op, soon
    return lambda: os.close(log)


def read_log(path: Path) -> list[Call]:
    """Return the calls in the order in which they were noted."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [Call(*map(int, line.split())) for line in lines]
