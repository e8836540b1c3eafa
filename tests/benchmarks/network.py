"""What lies between a contender and the server: the socket itself, or a proxy that delays."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from django.db import connection

from .protocol import Counts

CHECKOUT = Path(__file__).resolve().parents[2]

LIFETIME = 3600.0  # seconds, after which a proxy ends whatever happens
PATIENCE = 60.0  # seconds for a proxy to start, or to answer

#: The networks that are compared, each with the seconds that it adds to a round trip.
SOCKET = "socket"
NETWORKS: Mapping[str, float] = {SOCKET: 0.0, "0.5 ms": 0.0005, "2 ms": 0.002}


class ProxyFailedError(Exception):
    """The proxy did not start, or does not answer any more."""


@dataclass(slots=True)
class Proxy:
    """A running proxy. ``host``: where to connect to, with the port of the server behind it."""

    process: subprocess.Popen[bytes]
    host: str = ""

    def counts(self) -> Counts:
        """Return what was sent and committed through it since it started."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"?")
        self.process.stdin.flush()
        return Counts(**json.loads(self.read_line()))

    def read_line(self) -> str:
        assert self.process.stdout is not None
        line = b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([self.process.stdout], [], [], PATIENCE)
            more = os.read(self.process.stdout.fileno(), 4096) if ready else b""
            if not more:
                raise ProxyFailedError("expected a line from the proxy, got none.")
            line += more
        return line.decode().strip()


@contextmanager
def proxy(delay: float, lifetime: float = LIFETIME) -> Iterator[Proxy]:
    """Run a proxy before the server of Django's connection, in a process of its own."""
    config = connection.settings_dict
    server = (config["HOST"] or "localhost", str(config["PORT"] or 5432))
    command = [sys.executable, "-m", "tests.benchmarks.delay_proxy", *server]
    # Of its own session, so that Ctrl-C reaches only who started it, who ends it.
    process = subprocess.Popen(
        [*command, str(delay), str(lifetime)],
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


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()  # the end of its input is the sign to end
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()


def added_delay(through: Proxy, round_trips: int = 30) -> float:
    """Return the seconds that the proxy really adds to a round trip: a difference of medians."""
    # Imported late: it needs models, and a measurement is read without settings, too.
    from .contenders.raw import connect

    with connect(prepared=False) as direct, connect(prepared=False, host=through.host) as delayed:
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


@contextmanager
def opened(network: str) -> Iterator[Proxy | None]:
    """Open one of ``NETWORKS``; the socket has no proxy."""
    with ExitStack() as stack:
        yield None if network == SOCKET else stack.enter_context(proxy(NETWORKS[network]))
