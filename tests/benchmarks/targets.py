"""What is claimed, as ratios of two things that were measured in the same round."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from .contenders import (
    ARTICLE,
    BATCH,
    BY_HAND,
    COMMAND,
    IN_ORDER,
    LARGE_BATCH,
    LOCKS,
    OURS,
    PGQUEUER,
    RAW,
    SMALL,
    SMALL_COMMAND,
    WATCHED,
)
from .measuring import MESSAGES, STATEMENTS, Measurement
from .network import COUNTED, SOCKET


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a ratio."""

    name: str
    workers: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A figure of one side, or its ratio to another's, and its bound."""

    what: str
    scenario: str
    ours: Side
    theirs: Side | None = None
    figure: str = "rate"
    network: str = SOCKET
    bound: float
    at_most: bool = False

    def is_met(self, value: float) -> bool:
        return value <= self.bound if self.at_most else value >= self.bound

    def __str__(self) -> str:
        return f"{'≤' if self.at_most else '≥'} {self.bound:g}{'×' if self.theirs else ''}"

    def _values(self, results: Sequence[Measurement]) -> Iterator[float]:
        """Yield the value of each round in which both sides were measured."""
        ours = self._figures(results, self.ours)
        theirs = self._figures(results, self.theirs) if self.theirs else dict.fromkeys(ours, 1.0)
        return (ours[each] / theirs[each] for each in ours.keys() & theirs.keys())

    def _figures(self, results: Sequence[Measurement], side: Side) -> dict[int, float]:
        return {
            result.round: result.figures[self.figure]
            for result in results
            if (result.scenario, result.network) == (self.scenario, self.network)
            and (result.name, result.workers) == (side.name, side.workers)
            and self.figure in result.figures
        }

    def verdict(self, results: Sequence[Measurement]) -> tuple[float, float, float] | None:
        """Return the median, the least and the greatest value of the rounds, if there are any."""
        values = [*self._values(results)]
        return (median(values), min(values), max(values)) if values else None


def _one_by_one() -> Iterator[Target]:
    """One row at a time: on the socket, and where each message takes half a millisecond."""
    for name, how in ((OURS, "a call"), (COMMAND, "the command")):
        for scenario, network, bound in (("one-by-one", SOCKET, 2.1), ("network", "0.5 ms", 2.0)):
            yield Target(
                what=f"TRANSACTIONAL, batch 1, by {how}, vs the article's loop: {network}",
                scenario=scenario,
                network=network,
                ours=Side(name),
                theirs=Side(ARTICLE),
                bound=bound,
            )


def _small() -> Iterator[Target]:
    """Run again and again for one row, in one process."""
    for delivery, most in (("transactional", 4), ("at_most_once", 5), ("at_least_once", 5)):
        for name in (SMALL[delivery], SMALL_COMMAND[delivery]):
            yield Target(
                what=f"messages of a run: {name}",
                scenario="small",
                network=COUNTED,
                ours=Side(name),
                figure=MESSAGES,
                bound=most,
                at_most=True,
            )
        yield Target(
            what=f"time of the loop by hand vs that of a run: {SMALL[delivery]}",
            scenario="small",
            ours=Side(SMALL[delivery]),
            theirs=Side(BY_HAND),
            bound=0.83,
        )


def _processor_time() -> Iterator[Target]:
    """In this process's own time: what the server takes depends on what else runs there."""
    for name, scenario, most in ((OURS, "one-by-one", 0.2), (LARGE_BATCH, "batches", 0.012)):
        yield Target(
            what=f"processor time of a row, ms: {name}",
            scenario=scenario,
            ours=Side(name),
            figure="CPU ms per row",
            bound=most,
            at_most=True,
        )


TARGETS: Sequence[Target] = (
    *_small(),
    *_one_by_one(),
    Target(
        what="TRANSACTIONAL, batch 500, vs raw psycopg with the same statements",
        scenario="batches",
        ours=Side(LARGE_BATCH),
        theirs=Side(RAW),
        bound=0.5,
    ),
    Target(
        what="TRANSACTIONAL, batch 100, vs pgqueuer, batch 100",
        scenario="batches",
        ours=Side(BATCH),
        theirs=Side(PGQUEUER),
        bound=2.2,
    ),
    Target(
        what="in order of 100 keys, 20 handlers of 50 ms in flight, vs procrastinate with locks",
        scenario="in order",
        ours=Side(IN_ORDER),
        theirs=Side(LOCKS),
        bound=1.05,
    ),
    *_processor_time(),
    Target(
        what="5 ms handler with the ledger, metrics and traces, vs with none of them",
        scenario="watched",
        ours=Side(WATCHED),
        theirs=Side(OURS),
        bound=0.98,
    ),
    *(
        Target(
            what=f"statements per row, {workers} workers vs one",
            scenario="statements",
            network=COUNTED,
            ours=Side(OURS, workers),
            theirs=Side(OURS),
            figure=STATEMENTS,
            bound=1.1,
            at_most=True,
        )
        for workers in (16, 48)
    ),
)
