"""The networks between a contender and the server: the socket itself, or a proxy that delays."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from django.db import connection

from tests.waiting import PATIENCE, Late

from .protocol import Counts

CHECKOUT = Path(__file__).resolve().parents[2]

#: The networks that are compared, each with the seconds that it adds to a round trip.
SOCKET = "socket"
NETWORKS: Mapping[str, float] = {SOCKET: 0.0, "0.5 ms": 0.0005}
#: A proxy that counts, and does not delay.
COUNTED = "counted"


class ProxyFailedError(Exception):
    """The proxy did not start, or it does not answer."""


@dataclass(slots=True)
class Proxy:
    """A running proxy. ``host``: where to connect to, with the port of the server behind it."""

    process: subprocess.Popen[bytes]
    host: str = ""

    def take_counts(self) -> Counts:
        """Return what was sent through it since the last call."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # then there is no line, which is an error below
            self.process.stdin.write(b"?")
        return Counts(**json.loads(self.read_line()))

    def read_line(self) -> str:
        assert self.process.stdout is not None
        line = b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([self.process.stdout], [], [], PATIENCE)
            if not ready:
                raise Late("a line from the delay proxy")
            more = os.read(self.process.stdout.fileno(), 4096)
            if not more:
                raise ProxyFailedError("expected a line from the delay proxy, got its end.")
            line += more
        return line.decode().strip()


@contextmanager
def proxy(delay: float) -> Iterator[Proxy]:
    """Run a proxy before the server of Django's connection, in a process of its own.

    ``delay``: seconds that it adds to a round trip.
    """
    config = connection.settings_dict
    server = (config["HOST"] or "localhost", str(config["PORT"] or 5432))
    command = [sys.executable, "-m", "tests.benchmarks.delay_proxy", *server]
    # In a session of its own: Ctrl-C interrupts only this process, which ends the proxy.
    process = subprocess.Popen(
        [*command, str(delay)],
        bufsize=0,
        cwd=CHECKOUT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    started = Proxy(process)
    try:
        started.host = started.read_line()
        yield started
    finally:
        _end(process)
        # A proxy that was killed has left its folder.
        shutil.rmtree(started.host, ignore_errors=True)


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()  # the proxy ends when its input does
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()


def opened(network: str) -> AbstractContextManager[Proxy | None]:
    """Open one of ``NETWORKS``, or the one that counts; the socket has no proxy."""
    return nullcontext() if network == SOCKET else proxy(NETWORKS.get(network, 0.0))


def measured_delay(through: Proxy, round_trips: int = 30) -> float:
    """Return the seconds that the proxy adds to a round trip: a difference of two medians."""
    # Imported late: it needs models, and results are read from a file without settings, too.
    from .contenders.raw import connect

    with connect() as direct, connect(through.host) as delayed:
        times: dict[Any, list[float]] = {direct: [], delayed: []}
        for _ in range(round_trips):
            # In turn, so that other load on the machine affects both alike.
            for driver, taken in times.items():
                taken.append(_time(partial(driver.execute, "SELECT 1")))
        return median(times[delayed]) - median(times[direct])


def _time(call: Callable[[], object]) -> float:
    began = perf_counter()
    call()
    return perf_counter() - began
