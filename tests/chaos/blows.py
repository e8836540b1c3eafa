"""What the monkey does, each as a function that is over when the blow is.

A function notes at once the moment and whom it hits, and waits until the process or the session has
ended: the audit explains by it why a row was handled again. Those that hold something run beside
the others.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import psutil
import psycopg

from tests.servers import stoppable as servers
from tests.servers.stoppable import Server
from tests.waiting import PATIENCE, until

from .crew import Watcher
from .routes import POOLED, ROUTES, WIRE, Routes

Session = psycopg.Connection[Any]


@dataclass
class Blow:
    """One blow; times are the monotonic clock's."""

    kind: str
    began: float
    ended: float = 0.0
    #: Processes that were killed.
    pids: set[int] = field(default_factory=set)
    #: Sessions that were ended, by the server's process for them.
    backends: set[int] = field(default_factory=set)
    #: Routes on which sessions were ended, any of them.
    routes: Sequence[str] = ()


@dataclass(frozen=True)
class Reach:
    """What the monkey can lay hands on, and its dice."""

    server: Server
    routes: Routes
    watchers: Sequence[Watcher]
    dice: random.Random


def kill_worker(reach: Reach, blow: Blow) -> None:
    watcher = reach.dice.choice(reach.watchers)
    if copies := watcher.workers():
        copy = reach.dice.choice(copies)
        blow.pids.add(copy.pid)
        blow.routes = (watcher.route,)
        _kill(copy)


def kill_watcher(reach: Reach, blow: Blow) -> None:
    """Kill a watcher; its copies finish their rows, and end."""
    watcher = reach.dice.choice(reach.watchers)
    watcher.copies()
    blow.routes = (watcher.route,)
    blow.pids.add(watcher.parent.pid)
    _kill(watcher.parent)


def _kill(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.kill()
        until(lambda: process.status() == psutil.STATUS_ZOMBIE, "the end of what was killed")


def terminate(reach: Reach, blow: Blow) -> None:
    with reach.server.connect() as session:
        _terminate(reach, blow, session, reach.dice.randint(1, 3))


def _terminate(reach: Reach, blow: Blow, session: Session, number: int) -> None:
    found = session.execute(
        "SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend' "
        "AND application_name <> 'monkey' AND datname = %s ORDER BY pid",
        [servers.NAME],
    ).fetchall()
    for (pid,) in reach.dice.sample(found, min(number, len(found))):
        blow.backends.add(pid)
        session.execute("SELECT pg_terminate_backend(%s, %s)", [pid, int(1000 * PATIENCE)])


def restart_fast(reach: Reach, blow: Blow) -> None:
    _restart(reach, blow, servers.FAST)


def restart_immediate(reach: Reach, blow: Blow) -> None:
    _restart(reach, blow, servers.IMMEDIATE)


def _restart(reach: Reach, blow: Blow, how: Any) -> None:
    blow.routes = ROUTES
    reach.server.stop(how)
    time.sleep(reach.dice.uniform(0, 1))
    reach.server.start()


def exhaust(reach: Reach, blow: Blow) -> None:
    """Take every connection that is left, so that a worker that loses one gets no other."""
    blow.routes = POOLED  # they give up on clients that wait too long
    hold = reach.dice.uniform(1, 3)
    with ExitStack() as taken:
        taken.enter_context(session := reach.server.connect())
        with suppress(psycopg.OperationalError):
            while True:
                taken.enter_context(reach.server.connect())
        _terminate(reach, blow, session, 2)
        time.sleep(hold)


def hold_snapshot(reach: Reach, blow: Blow) -> None:
    """Keep the server from clearing away what the flips leave behind."""
    with reach.server.connect(autocommit=False) as session:
        session.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        session.execute("SELECT count(*) FROM tests_errand")
        time.sleep(reach.dice.uniform(4, 8))


LOCKED = (
    "SELECT id FROM tests_errand "
    "WHERE NOT done AND (coalesce(claimed_at, leased_until) IS NOT NULL) = %s "
    "ORDER BY random() LIMIT 50 FOR UPDATE SKIP LOCKED"
)


def lock_rows(reach: Reach, blow: Blow) -> None:
    """Lock rows that are about to be settled, and rows that wait."""
    with reach.server.connect(autocommit=False) as session:
        for held in (True, False):
            session.execute(LOCKED, [held])
        time.sleep(reach.dice.uniform(1, 3))


def drop_pool(reach: Reach, blow: Blow) -> None:
    blow.routes = (reach.dice.choice(POOLED),)
    reach.routes.drop_everybody(blow.routes[0])


def half_open(reach: Reach, blow: Blow) -> None:
    """Let half of the wires fall silent; then reset the one end, and later the other."""
    blow.routes = (WIRE,)
    wires = reach.routes.wire.fall_silent()
    time.sleep(reach.dice.uniform(1, 3))
    reach.routes.wire.reset(wires)
    time.sleep(reach.dice.uniform(0, 2))
    reach.routes.wire.end(wires)


Strike = Callable[[Reach, Blow], None]

#: How often each is in the deck, and whether others may come meanwhile.
DECK: dict[Strike, tuple[int, bool]] = {
    kill_worker: (4, False),
    kill_watcher: (1, False),
    terminate: (4, False),
    restart_fast: (1, False),
    restart_immediate: (1, False),
    exhaust: (1, True),
    hold_snapshot: (1, True),
    lock_rows: (2, True),
    drop_pool: (2, False),
    half_open: (2, True),
}
