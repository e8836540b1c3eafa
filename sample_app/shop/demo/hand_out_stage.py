"""Packings: handed out over HTTP to robots, of which some die, and one comes back too late."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

from django.core.management.base import CommandError

from sample_app.shop.demo import packing_robot
from sample_app.shop.demo.screen import Screen
from sample_app.shop.demo.verdict import Verdict, complaints
from sample_app.shop.demo.workers import MANAGE_PY, POLL_SECONDS
from sample_app.shop.models import Order, Packing
from sample_app.shop.packing import held_by, pack_orders

PACKINGS = 48
LEASE = 2.0  # seconds, so that what a dead robot held is handed out again soon
QUICK, SLOW = 0.02, LEASE + 1  # seconds that a packing takes
PATIENCE = 60.0  # seconds, for the robots to end, and for a server to start
MOST_ROUNDS = 8

Robot = subprocess.Popen[bytes]


def run(screen: Screen, workers: int) -> bool:
    """Let robots pack, kill some and suspend one; True if the audit is clean."""
    due = invent_packings()
    screen.step("due", f"{len(due):,} orders are to be packed by robots")
    if not due:
        screen.verdict(audit(due, Counter()))
        return True
    slow = min(max(1, workers // 2) + 1, len(due))
    keys = {f"robot-{1 + number}": secrets.token_hex(8) for number in range(slow + workers)}
    names = list(keys)
    with _server(keys) as server, _Hall(server.url, keys) as hall:
        screen.step("server", f"the shop's own pages at {server.url}, with a lease of {LEASE:g} s")
        _make_trouble(screen, hall, names[:slow])
        for name in names[slow:]:
            hall.start(name)
        hall.wait()
        _send_successors(screen, hall, names[-1], due)
        late = hall.let_go_on()
        hall.wait()
        settled = server.settled()
    screen.step("late", f"{late} goes on, when another robot has packed what it had")
    verdict = audit(due, settled)
    screen.verdict(verdict)
    return verdict.clean


def invent_packings() -> set[int]:
    """Have some orders packed; return the keys of all packings that are still to be done."""
    orders = Order.objects.filter(packing=None).order_by("number")[:PACKINGS]
    Packing.objects.bulk_create(Packing(order=order) for order in orders)
    return set(pack_orders.pending().order_by().values_list("pk", flat=True))


def audit(due: Collection[int], settled: Mapping[int, int]) -> Verdict:
    """Judge the packings; ``settled``: how often each was settled with success."""
    rows = Packing.objects.in_bulk(due)
    packed = {pk for pk, row in rows.items() if row.state == Packing.State.PACKED}
    orders = dict(Order.objects.filter(packing__in=due).values_list("packing", "number"))
    wrong = [pk for pk in packed if rows[pk].grams != packing_robot.weigh(orders[pk])]
    twice = [pk for pk, times in settled.items() if times > 1]
    return Verdict(
        figures=(
            f"{len(due):,} due, {len(packed):,} packed by robots, {len(twice):,} settled twice"
        ),
        complaints=complaints(
            ("not packed: packing", sorted(set(due) - packed)),
            ("settled more than once: packing", sorted(twice)),
            ("packed, and never settled: packing", sorted(packed - settled.keys())),
            ("settled, and not packed: packing", sorted(settled.keys() - packed)),
            ("with the weight of another order: packing", sorted(wrong)),
        ),
        praise="All is well: every packing was settled once, though robots died.",
    )


def _make_trouble(screen: Screen, hall: _Hall, names: Sequence[str]) -> None:
    """Kill slow robots while they pack, and suspend the last one."""
    for name in names:
        hall.start(name, takes=SLOW)
    for name in names:
        hall.wait_until_packing(name)
    *killed, suspended = names
    for name in killed:
        hall.kill(name)
        screen.step("killed", f"{name}, while it packs")
    hall.suspend(suspended)
    screen.step("paused", f"{suspended}, while it packs")


def _send_successors(screen: Screen, hall: _Hall, name: str, due: Collection[int]) -> None:
    """Let a robot pack what is left, when the leases have lapsed."""
    for _ in range(MOST_ROUNDS):
        left = pack_orders.pending().filter(pk__in=due).count()
        if not left:
            return
        time.sleep(LEASE)
        screen.step("again", f"{left:,} left behind, handed out again when the lease has lapsed")
        hall.start(name)
        hall.wait()


@dataclass
class _Running:
    """The shop's server; ``log``: what it prints."""

    url: str
    log: IO[str]

    def settled(self) -> Counter[int]:
        """Return how often each packing was settled with success, by its key."""
        self.log.seek(0)
        lines = [line.split() for line in self.log.readlines()[1:]]
        return Counter(int(pk) for pk, outcome in lines if outcome == "processed")


@contextmanager
def _server(keys: Mapping[str, str]) -> Iterator[_Running]:
    """Run the shop's server, with these robots, until the block's end."""
    environment = {
        **os.environ,
        "DEBUG": "no",
        "ROBOT_KEYS": ",".join(f"{name}={key}" for name, key in keys.items()),
        "PACKING_LEASE": str(LEASE),
    }
    command = [sys.executable, str(MANAGE_PY), "serve_packings"]
    with (
        tempfile.TemporaryDirectory() as folder,
        Path(folder, "log").open("w+", encoding="utf-8") as log,
        _process(command, environment, stdout=log) as server,
    ):
        port, deadline = "", time.monotonic() + PATIENCE
        while not port.endswith("\n"):
            if server.poll() is not None or time.monotonic() > deadline:
                raise CommandError("Expected the shop's server for the robots to start, it did not")
            time.sleep(POLL_SECONDS)
            port = Path(log.name).read_text(encoding="utf-8")
        yield _Running(f"http://127.0.0.1:{int(port)}/packings", log)


class _Hall:
    """The robots, as processes; a name has one at a time."""

    def __init__(self, url: str, keys: Mapping[str, str]) -> None:
        self._url = url
        self._keys = keys
        self._stack = ExitStack()
        self._robots: dict[str, Robot] = {}
        self._suspended: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, name: str, *, takes: float = QUICK) -> None:
        """Start a robot that needs so many seconds for a packing."""
        robot = [sys.executable, packing_robot.__file__, self._url, name, self._keys[name]]
        process = _process([*robot, str(takes)], os.environ)
        self._robots[name] = self._stack.enter_context(process)

    def wait_until_packing(self, name: str) -> None:
        """Wait until the shop has handed a packing out to the robot."""
        deadline = time.monotonic() + PATIENCE
        while not held_by(name).exists():
            if self._robots[name].poll() is not None or time.monotonic() > deadline:
                raise CommandError(f"Expected {name} to pack, it got nothing to pack")
            time.sleep(POLL_SECONDS)

    def kill(self, name: str) -> None:
        """Kill a robot, as a crash does."""
        self._robots[name].kill()

    def suspend(self, name: str) -> None:
        """Let a robot do nothing, not even renew its lease."""
        self._robots[name].send_signal(signal.SIGSTOP)
        self._suspended.add(name)

    def let_go_on(self) -> str:
        """Let the suspended robot go on; return its name."""
        suspended, self._suspended = self._suspended, set()
        for name in suspended:
            self._robots[name].send_signal(signal.SIGCONT)
        return ", ".join(suspended)

    def wait(self) -> None:
        """Wait for the robots that are at work."""
        for name in self._robots.keys() - self._suspended:
            self._robots[name].wait(PATIENCE)


@contextmanager
def _process(
    command: Sequence[str], environment: Mapping[str, str], *, stdout: IO[str] | None = None
) -> Iterator[Robot]:
    """Run a process, and kill it at the block's end if it has not ended."""
    errors = subprocess.DEVNULL
    with subprocess.Popen(
        command, env=environment, stdout=stdout or subprocess.DEVNULL, stderr=errors
    ) as process:
        try:
            yield process
        finally:
            process.kill()
