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
    LOCKS,
    OURS,
    SMALL,
    SMALL_COMMAND,
    SPANNING,
    WATCHED,
)
from .measuring import MESSAGES, Measurement
from .network import COUNTED, SOCKET


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a ratio: a contender, or the best of several."""

    names: Sequence[str]
    workers: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A figure of one side, or its ratio (or difference) to another's, and its bound."""

    what: str
    scenario: str
    ours: Side
    theirs: Side | None = None
    figure: str = "rate"
    network: str = SOCKET
    bound: float
    at_most: bool = False
    difference: bool = False

    def is_met(self, value: float) -> bool:
        return value <= self.bound if self.at_most else value >= self.bound

    def __str__(self) -> str:
        sign = "≤" if self.at_most else "≥"
        return f"{sign} {self.bound:g}{'×' if self.theirs and not self.difference else ''}"

    def measured(self, results: Sequence[Measurement]) -> list[float]:
        """Return the value of each round in which both sides were measured."""
        return list(self._values(results))

    def _values(self, results: Sequence[Measurement]) -> Iterator[float]:
        for round_ in sorted({result.round for result in results}):
            ours = _best(self, results, self.ours, round_)
            if ours is None:
                continue
            if self.theirs is None:
                yield ours
                continue
            theirs = _best(self, results, self.theirs, round_)
            if theirs is not None:
                yield ours - theirs if self.difference else ours / theirs


def _best(target: Target, results: Sequence[Measurement], side: Side, round_: int) -> float | None:
    found = [
        result.figures[target.figure]
        for result in results
        if (result.scenario, result.network) == (target.scenario, target.network)
        and (result.workers, result.round) == (side.workers, round_)
        and any(result.name == name or result.name.startswith(f"{name} of ") for name in side.names)
        and target.figure in result.figures
    ]
    return max(found, default=None)


def verdict(target: Target, results: Sequence[Measurement]) -> tuple[float, float, float] | None:
    """Return the median, the least and the greatest value of the rounds, if there are any."""
    values = target.measured(results)
    return (median(values), min(values), max(values)) if values else None


def _crowd(kind: str, name: str) -> Iterator[Target]:
    for workers in (16, 48):
        yield Target(
            what=f"statements per row, {kind}, {workers} workers vs one",
            scenario="statements",
            network=COUNTED,
            ours=Side([name], workers),
            theirs=Side([name]),
            figure="statements per row",
            bound=1.1,
            at_most=True,
        )


def _backlog() -> Iterator[Target]:
    small = Side([f"{BATCH}, out"])
    for place in ("head", "middle", "tail"):
        large = Side([f"{BATCH}, {place}"])
        yield Target(
            what=f"rows from the {place} of 50 times as many pending, vs out of themselves",
            scenario="backlog",
            ours=large,
            theirs=small,
            bound=0.9,
        )
        yield Target(
            what=f"memory there ({place}): MB more than with the small backlog",
            scenario="backlog",
            ours=large,
            theirs=small,
            figure="peak MB",
            bound=20,
            at_most=True,
            difference=True,
        )


def _one_by_one() -> Iterator[Target]:
    """One row at a time: on the socket, and where each message takes half a millisecond."""
    for name, how in ((OURS, "a call"), (COMMAND, "the command")):
        for scenario, network, bound in (("one-by-one", SOCKET, 2.1), ("network", "0.5 ms", 2.0)):
            yield Target(
                what=f"TRANSACTIONAL, batch 1, by {how}, vs the article's loop: {network}",
                scenario=scenario,
                network=network,
                ours=Side([name]),
                theirs=Side([ARTICLE]),
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
                ours=Side([name]),
                figure=MESSAGES,
                bound=most,
                at_most=True,
            )
        yield Target(
            what=f"time of the loop by hand vs that of a run: {SMALL[delivery]}",
            scenario="small",
            ours=Side([SMALL[delivery]]),
            theirs=Side([BY_HAND]),
            bound=0.83,
        )


def _processor_time() -> Iterator[Target]:
    """In this process's own time: what the server takes depends on what else runs there."""
    for name, scenario, most in (
        (OURS, "one-by-one", 0.2),
        ("transactional, batch 500", "batches", 0.012),
    ):
        yield Target(
            what=f"processor time of a row, ms: {name}",
            scenario=scenario,
            ours=Side([name]),
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
        ours=Side(["transactional, batch 500"]),
        theirs=Side(["raw statements, batch 500"]),
        bound=0.5,
    ),
    Target(
        what="TRANSACTIONAL, batch 100, vs pgqueuer, batch 100",
        scenario="batches",
        ours=Side([BATCH]),
        theirs=Side(["pgqueuer, batch 100"]),
        bound=2.2,
    ),
    Target(
        what="in order of 100 keys, 20 handlers of 50 ms in flight, vs procrastinate with locks",
        scenario="in order",
        ours=Side([IN_ORDER]),
        theirs=Side([LOCKS]),
        bound=1.05,
    ),
    *_processor_time(),
    Target(
        what="5 ms handler with the ledger, metrics and traces, vs with none of them",
        scenario="watched",
        ours=Side([WATCHED]),
        theirs=Side([OURS]),
        bound=0.98,
    ),
    *_crowd("own-table", OURS),
    *_crowd("spanning", SPANNING),
    *_backlog(),
    Target(
        what="after 100,000 flips under an old snapshot, vs without one",
        scenario="snapshot",
        ours=Side([f"{OURS}, old snapshot"]),
        theirs=Side([f"{OURS}, no old snapshot"]),
        bound=0.8,
    ),
)
