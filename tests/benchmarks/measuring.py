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
from .network import SOCKET, Proxy, measured_delay, opened
from .protocol import Counts
from .team import Order, Share, Team

#: Figures of a contender that is measured through a proxy, and one that handlers have.
MESSAGES, STATEMENTS, DELAY = "messages per row", "statements per row", "measured delay, ms"
PROCESSOR = "CPU ms per row"


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one contender did in one round. ``figures`` by name; *rate* is rows per second.

    ``network``: what is between the contender and the server, of ``network.NETWORKS``.
    """

    scenario: str
    name: str
    workers: int
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
    workers: Collection[int]
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
            f"x{measurement.workers}, {measurement.network}: {figures}"
        )


def drain(
    members: Team,
    name: str,
    expected: Collection[int],
    *,
    workers: int = 1,
    delay: float = 0.0,
    through: Proxy | None = None,
) -> dict[str, float]:
    """Let a contender handle the rows that are there; audit it, and return the figures.

    ``expected``: the keys that it is to handle; ``through``: a proxy that it connects to, and that
    counts what it sends.
    """
    contender = CONTENDERS[name]
    host = through.host if through else connection.settings_dict["HOST"]
    with tempfile.TemporaryDirectory(prefix="dcl-bench-") as folder:
        log = Path(folder) / "log"
        order = Order(name, host, log, delay)
        # What was counted before the start does not belong to the drain.
        shares = members.drain(order, workers, through.take_counts if through else None)
        sent = _sent(through.take_counts(), len(expected)) if through else {}
        calls = read_log(log)
        audit(name, expected, calls, contender.left())
        figures = {"rate": len(expected) / _seconds(contender, shares, calls), **sent}
        figures[PROCESSOR] = 1e3 * sum(share.cpu for share in shares) / len(expected)
    return figures


def _sent(counts: Counts, rows: int) -> dict[str, float]:
    return {MESSAGES: counts.messages / rows, STATEMENTS: counts.statements / rows}


def _seconds(contender: Contender, shares: Sequence[Share], calls: Sequence[Call]) -> float:
    if shares[0].seconds is not None:
        return shares[0].seconds
    if contender.clock == "handler":
        times = [call.nanoseconds for call in calls]
        # From the first call to the last, one row fewer is handled than there are.
        return (max(times) - min(times)) / 1e9 * len(times) / max(len(times) - 1, 1)
    return max(share.ended for share in shares) - min(share.began for share in shares)


def take_turns(
    bench: Bench,
    scenario: str,
    names: Sequence[str],
    rows: int,
    *,
    networks: Sequence[str] = (SOCKET,),
    workers: int = 1,
    **how: Any,
) -> None:
    """Measure each contender once in each round and network; another one begins each time.

    What the machine does besides comes and goes over the rounds, and strikes all alike.
    """
    names = bench.installed(names)
    for name in names:
        # The first drain of a process imports and connects.
        _fill_and_drain(bench, name, max(workers, 10), workers=workers)
    for round_ in range(bench.rounds):
        start = round_ % len(names) if names else 0
        for network in networks:
            with opened(network) as through:
                for name in (*names[start:], *names[:start]):
                    figures = _fill_and_drain(
                        bench, name, rows, workers=workers, through=through, **how
                    )
                    bench.note(
                        Measurement(scenario, name, workers, round_ + 1, rows, figures, network)
                    )


def _fill_and_drain(
    bench: Bench, name: str, rows: int, *, through: Proxy | None = None, **how: Any
) -> dict[str, float]:
    CONTENDERS[name].prepare(rows)
    delay = {DELAY: 1e3 * measured_delay(through)} if through else {}
    return drain(bench.members, name, range(1, rows + 1), through=through, **how) | delay
