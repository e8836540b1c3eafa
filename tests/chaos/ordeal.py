"""One ordeal: the workers come to work, the chaos, the rest of the rows, and the judgement."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tests.servers.stoppable import Server
from tests.waiting import PATIENCE, until

from . import audit, judgement, person, table
from .blows import Blow, Reach
from .crew import Watcher, at_work
from .monkey import Monkey
from .routes import ROUTES, Routes


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much of everything; times are in seconds."""

    rows: int
    #: Workers on each route.
    copies: int = 2
    #: Rows at least that wait while the monkey is about, until it has dealt everything it has.
    low: int = 300
    #: The average time that a handler takes.
    work: float
    #: The chaos ends after so long, or when the rows are running out, but not before every kind
    #: of blow was dealt.
    chaos: float
    #: The average time between two blows.
    pause: float
    #: The most that the rest may take.
    calm: float


@dataclass
class Ordeal:
    """What became of each delivery that was tried."""

    deliveries: dict[str, dict[str, int]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    blows: list[Blow] = field(default_factory=list)
    cut_short: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Stage:
    """Where it takes place."""

    server: Server
    routes: Routes
    folder: Path
    say: Callable[[str], None]


def undergo(stage: Stage, names: Sequence[str], plan: Plan, dice: random.Random) -> Ordeal:
    """Let the workers handle the rows of these deliveries, and judge what became of them."""
    stage.say(f"{' and '.join(names)}: the workers start; {plan}")
    for name in names:
        table.fill(stage.server, name, plan.rows)
    lines = stage.folder / f"{names[0]}.audit"
    variables = {"CHAOS_AUDIT": str(lines), "CHAOS_WORK": str(plan.work)}
    processors = [f"chaos.{name}" for name in names]
    with at_work(stage.routes, processors, plan.copies, stage.folder, **variables) as watchers:
        with person.at_hand(names, lines):
            # Of a key with most of the rows no more workers may have one.
            copies = len(ROUTES) * plan.copies
            all_copies = max(table.PROCESSORS[name].most or copies for name in names)
            keep = partial(_mend, stage, names, plan, watchers)
            _wait_for_all(lines, all_copies, since=0.0, keep=keep)
            stage.say("the chaos")
            reach = Reach(stage.server, stage.routes, watchers, dice)
            monkey = Monkey(reach, pause=plan.pause)
            over = _chaos(stage, names, plan, monkey, watchers)
            stage.say("the rest")
            _wait_for_all(lines, all_copies, since=over, keep=keep)
            withdrawn = _drain(stage, names, plan, watchers, lines)
        # The last decision may have put a row back.
        _is_drained(stage, names, watchers, PATIENCE)
        stage.say("the workers stop")
    stage.say("the judgement")
    ordeal = Ordeal(blows=monkey.blows, cut_short=monkey.cut_short)
    for name in names:
        records = table.records(stage.server, name, lines, monkey.blows)
        verdict = judgement.judge(table.PROCESSORS[name], records)
        ordeal.faults += [f"{name}: {fault}" for fault in verdict.faults]
        ordeal.deliveries[name] = {**verdict.counts, "withdrawn": withdrawn.get(name, 0)}
    return ordeal


def _wait_for_all(lines: Path, number: int, *, since: float, keep: Callable[[], None]) -> None:
    """Wait until so many workers have begun a row since then."""

    def are_there() -> bool:
        keep()
        return len({call.pid for call in audit.read(lines) if call.began >= since}) >= number

    until(are_there, f"{number} workers to begin", pause=0.1)


def _restart(watchers: Sequence[Watcher]) -> None:
    """Start the watchers that have ended, as a service manager does."""
    for watcher in watchers:
        watcher.mend()


def _mend(stage: Stage, names: Sequence[str], plan: Plan, watchers: Sequence[Watcher]) -> None:
    """Restart watchers that have ended, and add rows where few are left."""
    _restart(watchers)
    for name in names:
        if table.left(stage.server, name) < plan.low:
            table.fill(stage.server, name, plan.low)


def _chaos(
    stage: Stage, names: Sequence[str], plan: Plan, monkey: Monkey, watchers: Sequence[Watcher]
) -> float:
    """Let the monkey rage; return when it was over."""
    deadline = time.monotonic() + plan.chaos
    while True:
        monkey.strike()
        _restart(watchers)
        short = [name for name in names if table.left(stage.server, name) < plan.low]
        if monkey.decks and (short or time.monotonic() > deadline):
            break
        for name in short:
            table.fill(stage.server, name, plan.low)
    monkey.end()
    return time.monotonic()


def _drain(
    stage: Stage, names: Sequence[str], plan: Plan, watchers: Sequence[Watcher], lines: Path
) -> dict[str, int]:
    """Give the workers time for the rest; what is left after that, the judgement finds.

    Returns how many rows of each delivery were withdrawn, because a slow machine has not come to
    them: what was begun is to be brought to its end all the same.
    """
    if _is_drained(stage, names, watchers, plan.calm):
        return {}
    calls = audit.read(lines)
    withdrawn = {name: table.withdraw(stage.server, name, calls) for name in names}
    _is_drained(stage, names, watchers, PATIENCE)
    return withdrawn


def _is_drained(
    stage: Stage, names: Sequence[str], watchers: Sequence[Watcher], seconds: float
) -> bool:
    deadline = time.monotonic() + seconds
    while any(table.left(stage.server, name) for name in names):
        if time.monotonic() > deadline:
            return False
        _restart(watchers)
        time.sleep(0.2)
    return True
