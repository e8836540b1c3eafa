"""One measurement: fill, drain, audit; and rounds of them, in which the contenders take turns."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from django.db import connection

from .audit import audit
from .contenders import CONTENDERS, Contender
from .handling import Call, read_log
from .network import SOCKET, Proxy, added_delay, opened, proxy
from .protocol import Counts
from .team import Order, Share, Team, team
from .wire import read

#: Figures of what a contender sends and commits, and of the network between.
MESSAGES, COMMITS = "messages per row", "commits per row"
ADDED = "added ms"


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one contender did in one round. ``figures`` by name; *rate* is rows per second.

    ``network``: what lay between it and the server, of ``network.NETWORKS``.
    """

    scenario: str
    name: str
    copies: int
    round: int
    rows: int
    figures: Mapping[str, float]
    network: str = SOCKET


@dataclass(slots=True)
class Bench:
    """What all scenarios share: the team, the sizes, and what was measured so far."""

    members: Team
    unit: int  # rows; each scenario takes a multiple
    rounds: int
    copies: Collection[int]
    tell: Callable[[str], None]
    results: list[Measurement] = field(default_factory=list)
    left_out: set[str] = field(default_factory=set)

    def installed(self, names: Sequence[str]) -> list[str]:
        """Return those that are installed here, and remember the others."""
        self.left_out.update(name for name in names if not CONTENDERS[name].is_installed())
        return [name for name in names if CONTENDERS[name].is_installed()]

    def note(self, measurement: Measurement) -> None:
        self.results.append(measurement)
        figures = ", ".join(f"{name} {value:.4g}" for name, value in measurement.figures.items())
        self.tell(
            f"{measurement.scenario}, round {measurement.round}: {measurement.name} "
            f"x{measurement.copies}, {measurement.network}: {figures}"
        )


def drain(
    members: Team,
    name: str,
    expected: Collection[int],
    *,
    copies: int = 1,
    delay: float = 0.0,
    traced: bool = False,
    left: int = 0,
    options: Mapping[str, Any] | None = None,
    through: Proxy | None = None,
) -> dict[str, float]:
    """Let a contender handle the rows that are there; audit it, and return the figures.

    ``expected``: the keys that it is to handle; ``left``: how many may be pending afterwards;
    ``through``: the proxy that it connects to, which counts.
    """
    contender = CONTENDERS[name]
    count = _Count(through, len(expected))
    with tempfile.TemporaryDirectory(prefix="dcl-bench-") as folder:
        log = Path(folder) / "log"
        trace = Path(folder) / "trace" if traced else None
        host = through.host if through else connection.settings_dict["HOST"]
        order = Order(name, host, log, copies, delay, trace, options or {})
        shares = members.drain(order, 1 if contender.makes_copies else copies, count.begin)
        counted = count.end()
        calls = read_log(log)
        audit(name, expected, calls if contender.has_log else None, contender.left() - left)
        figures = {"rate": len(expected) / _seconds(contender, shares, calls), **counted}
        if contender.has_log:
            figures |= _per_copy(shares, calls, copies)
        if traced:
            figures |= _talk(Path(folder), len(expected))
    figures["peak MB"] = max(share.peak for share in shares) / 1024
    return figures


@dataclass(slots=True)
class _Count:
    """What a contender sends and commits from the start of its drain to the end, for each row."""

    through: Proxy | None
    rows: int
    before: Counts = field(default_factory=Counts)

    def begin(self) -> None:
        if self.through is not None:
            self.before = self.through.counts()

    def end(self) -> dict[str, float]:
        if self.through is None:
            return {}
        after = self.through.counts()
        return {
            MESSAGES: (after.messages - self.before.messages) / self.rows,
            COMMITS: (after.commits - self.before.commits) / self.rows,
        }


def _per_copy(shares: Sequence[Share], calls: Sequence[Call], copies: int) -> dict[str, float]:
    figures = {"CPU ms per row": 1e3 * sum(share.cpu for share in shares) / len(calls)}
    if copies > 1:
        handled = [sum(call.copy == copy for call in calls) for copy in range(copies)]
        figures["slowest share"] = min(handled) * copies / len(calls)
    return figures


def _seconds(contender: Contender, shares: Sequence[Share], calls: Sequence[Call]) -> float:
    if shares[0].seconds is not None:
        return shares[0].seconds
    if contender.clock == "handler":
        times = [call.nanoseconds for call in calls]
        # From the first call to the last, one row fewer is handled than there are.
        return (max(times) - min(times)) / 1e9 * len(times) / max(len(times) - 1, 1)
    return max(share.ended for share in shares) - min(share.began for share in shares)


def _talk(folder: Path, rows: int) -> dict[str, float]:
    talks = [read(path) for path in folder.glob("trace.*")]
    return {
        "statements per row": sum(len(talk.statements) for talk in talks) / rows,
        "round trips per row": sum(talk.round_trips for talk in talks) / rows,
    }


def take_turns(
    bench: Bench,
    scenario: str,
    names: Sequence[str],
    rows: int,
    *,
    networks: Sequence[str] = (SOCKET,),
    counted: bool = False,
    **how: Any,
) -> None:
    """Measure each contender once in each round; another one begins each time.

    What the machine does besides comes and goes over the rounds, and strikes all alike.
    ``counted``: say how much each sends and commits, by another turn that is not timed.
    """
    turns = _Turns(bench, scenario, rows, how, counted)
    names = bench.installed(names)
    for round_ in range(bench.rounds):
        start = round_ % len(names) if names else 0
        for network in networks:
            with opened(network) as through:
                for name in (*names[start:], *names[:start]):
                    turns.take(name, round_, network, through)


@dataclass(slots=True)
class _Turns:
    """The turns of one scenario. ``how``: the parameters of ``drain()``."""

    bench: Bench
    scenario: str
    rows: int
    how: Mapping[str, Any]
    is_counted: bool
    counts: dict[str, Mapping[str, float]] = field(default_factory=dict)

    def take(self, name: str, round_: int, network: str, through: Proxy | None) -> None:
        if round_ == 0:
            if self.is_counted:
                self.counts[name] = self._count(name)
            self._warm_up(name)
        added = {} if through is None else {ADDED: 1e3 * added_delay(through)}
        figures = self._drain(name, self.rows, through=through, **self.how)
        figures |= {**self.counts.get(name, {}), **added}
        copies = self.how.get("copies", 1)
        self.bench.note(
            Measurement(self.scenario, name, copies, round_ + 1, self.rows, figures, network)
        )

    def _count(self, name: str) -> Mapping[str, float]:
        # Not in the turn that is timed: the proxy takes time, even if it adds no delay.
        with proxy(0.0) as through:
            figures = self._drain(name, self.rows, through=through, **self.how)
        return {figure: figures[figure] for figure in (MESSAGES, COMMITS)}

    def _warm_up(self, name: str) -> None:
        # The first drain of a process imports and connects.
        copies = self.how.get("copies", 1)
        self._drain(name, max(copies, 10), copies=copies)

    def _drain(self, name: str, rows: int, **how: Any) -> dict[str, float]:
        CONTENDERS[name].prepare(rows)
        return drain(self.bench.members, name, range(1, rows + 1), **how)


def alone(name: str, expected: Collection[int], **how: Any) -> dict[str, float]:
    """Drain in a process that has done nothing before, so that its peak of memory is its own."""
    with team() as members:
        return drain(members, name, expected, **how)
