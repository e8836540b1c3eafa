"""What is claimed, as ratios of two things that were measured in the same round."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from .contenders import (
    ARTICLE,
    BATCH,
    CONCURRENT,
    FAILING,
    IN_ORDER,
    LOCKS,
    ONE_MESSAGE,
    OURS,
    SPANNING,
    WATCHED,
    WITH_FAILURES,
)
from .measuring import Measurement
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


def _crowd(kind: str, name: str, most: float) -> Iterator[Target]:
    for workers in (16, 48):
        yield Target(
            what=f"statements per row, {kind}, {workers} workers",
            scenario="statements",
            network=COUNTED,
            ours=Side([name], workers),
            figure="statements per row",
            bound=most,
            at_most=True,
        )
        yield Target(
            what=f"the same vs one worker's ({kind}, {workers} workers)",
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
    what = "TRANSACTIONAL, batch 1, vs"
    bounds = {
        (ARTICLE, "the article's loop"): (2.5, 3.5),
        ("raw statements, batch 1", "raw psycopg with four messages"): (1.4, 2.2),
        (ONE_MESSAGE, "raw psycopg with the same one message"): (0.7, 0.7),
    }
    for (name, words), both in bounds.items():
        places = (("one-by-one", SOCKET), ("network", "0.5 ms"))
        for (scenario, network), bound in zip(places, both, strict=True):
            yield Target(
                what=f"{what} {words}: {network}",
                scenario=scenario,
                network=network,
                ours=Side([OURS]),
                theirs=Side([name]),
                bound=bound,
            )


def _racing() -> Iterator[Target]:
    for workers, bound in ((16, 12), (48, 25)):
        yield Target(
            what=f"{workers} workers, 5 ms handler, vs the article's loop with {workers}",
            scenario="workers",
            ours=Side([OURS], workers),
            theirs=Side([ARTICLE], workers),
            bound=bound,
        )
        yield Target(
            what=f"share of the slowest of {workers} workers, of the mean",
            scenario="workers",
            ours=Side([OURS], workers),
            figure="slowest share",
            bound=0.7,
        )


def _in_order() -> Iterator[Target]:
    what = "in order of 100 keys, 20 handlers of 50 ms in flight"
    ours = Side([IN_ORDER])
    yield Target(
        what=f"{what}, vs procrastinate with locks",
        scenario="in order",
        ours=ours,
        theirs=Side([LOCKS]),
        bound=1.5,
    )
    # 19 of 20 in flight are 380 rows in a second.
    yield Target(what=f"{what}: rows per second, of 400", scenario="in order", ours=ours, bound=380)
    yield Target(
        what="statements per row, in order",
        scenario="statements",
        network=COUNTED,
        ours=ours,
        figure="statements per row",
        bound=3,
        at_most=True,
    )


def _extras() -> Iterator[Target]:
    """In this process's own time: what the server takes depends on what else runs there."""
    ratios = (
        ("batch 100, vs the bare driver's", BATCH, "raw statements, batch 100", 7.5),
        ("batch 100, vs the article's loop", BATCH, ARTICLE, 0.04),
        (f"batch 100, {FAILING} % of rows fail, vs none", WITH_FAILURES, BATCH, 1.5),
    )
    for what, ours, theirs, bound in ratios:
        yield Target(
            what=f"processor time of a row: {what}",
            scenario="extras",
            ours=Side([ours]),
            theirs=Side([theirs]),
            figure="CPU ms per row",
            bound=bound,
            at_most=True,
        )
    both: dict[str, Any] = {"ours": Side([WATCHED]), "theirs": Side([OURS])}
    what = "5 ms handler with the ledger, metrics and traces, vs with none of them"
    yield Target(what=what, scenario="watched", bound=0.97, **both)
    yield Target(
        what="processor time of a row: ms more with all three",
        scenario="watched",
        figure="CPU ms per row",
        bound=0.3,
        at_most=True,
        difference=True,
        **both,
    )


TARGETS: Sequence[Target] = (
    *_one_by_one(),
    Target(
        what="AT_MOST_ONCE, batch 1, vs raw psycopg with the same one-statement claim",
        scenario="one-by-one",
        ours=Side(["at most once, batch 1"]),
        theirs=Side(["raw claim, batch 1"]),
        bound=0.75,
    ),
    Target(
        what="TRANSACTIONAL, batch 500, vs raw psycopg with the same statements",
        scenario="batches",
        ours=Side(["transactional, batch 500"]),
        theirs=Side(["raw statements, batch 500"]),
        bound=0.6,
    ),
    Target(
        what="TRANSACTIONAL, batch 100, vs pgqueuer, batch 100",
        scenario="batches",
        ours=Side([BATCH]),
        theirs=Side(["pgqueuer, batch 100"]),
        bound=2.5,
    ),
    Target(
        what="one handler in flight, one commit per row, vs the best of the queues",
        scenario="queues",
        ours=Side([OURS]),
        theirs=Side(["django-tasks-db", "procrastinate", "django-mailer"]),
        bound=2.5,
    ),
    Target(
        what="ten handlers in flight, one commit per row, vs procrastinate with ten",
        scenario="queues",
        ours=Side([CONCURRENT]),
        theirs=Side(["procrastinate, concurrency 10"]),
        bound=2,
    ),
    *_in_order(),
    *_extras(),
    *_racing(),
    *_crowd("own-table", OURS, 2.2),
    *_crowd("spanning", SPANNING, 3.2),
    *_backlog(),
    Target(
        what="after 100,000 flips under an old snapshot, vs without one",
        scenario="snapshot",
        ours=Side([f"{OURS}, old snapshot"]),
        theirs=Side([f"{OURS}, no old snapshot"]),
        bound=0.8,
    ),
)
