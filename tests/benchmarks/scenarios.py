"""What is measured; each scenario's rows are a multiple of the unit (ROWS=, 1,000 by default)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

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
from .measuring import Bench, take_turns
from .network import COUNTED, NETWORKS

ONE_BY_ONE = (OURS, COMMAND, ARTICLE)


def one_by_one(bench: Bench) -> None:
    """One worker, one commit for each row, a handler that does nothing."""
    take_turns(_more(bench), "one-by-one", ONE_BY_ONE, bench.unit)


def network(bench: Bench) -> None:
    """Do the same on the socket and through a delay, with fewer rows: most take several delays."""
    networks = tuple(NETWORKS)
    take_turns(_fewer(bench), "network", ONE_BY_ONE, max(bench.unit // 5, 10), networks=networks)


def small(bench: Bench) -> None:
    """Handle one row in each run, and measure the time of a run and what it sends."""
    number = max(bench.unit // 10, 10)
    names = (BY_HAND, *SMALL.values(), *SMALL_COMMAND.values())
    take_turns(_more(bench), "small", names, number)
    take_turns(replace(bench, rounds=1), "small", names, number, networks=(COUNTED,))


def batches(bench: Bench) -> None:
    """One worker, many rows for each commit, a handler that does nothing."""
    take_turns(_more(bench), "batches", (BATCH, LARGE_BATCH, RAW, PGQUEUER), 20 * bench.unit)


def watched(bench: Bench) -> None:
    """One worker, a handler that takes 5 ms, and all that can be noted of each row, or nothing."""
    take_turns(_more(bench), "watched", (OURS, WATCHED), bench.unit, delay=0.005)


def in_order(bench: Bench) -> None:
    """Rows of a hundred keys, each key's in order, and twenty handlers in flight of 50 ms each."""
    take_turns(bench, "in order", (IN_ORDER, LOCKS), bench.unit, delay=0.05)


def statements(bench: Bench) -> None:
    """Count what racing workers say to the server; their handler takes 5 ms."""
    for workers in bench.workers:
        delay = 0.005 if workers > 1 else 0.0
        counted: dict[str, Any] = {"workers": workers, "delay": delay, "networks": (COUNTED,)}
        take_turns(_fewer(bench), "statements", (OURS,), 5 * bench.unit, **counted)


def _fewer(bench: Bench) -> Bench:
    """Return the same bench with fewer rounds, for what takes long."""
    return replace(bench, rounds=(bench.rounds + 1) // 2)


def _more(bench: Bench) -> Bench:
    """Return the same bench with more rounds: many short turns even out a machine's moods."""
    return replace(bench, rounds=2 * bench.rounds if bench.rounds > 1 else 1)


SCENARIOS: Mapping[str, Callable[[Bench], None]] = {
    "one-by-one": one_by_one,
    "network": network,
    "small": small,
    "batches": batches,
    "watched": watched,
    "in order": in_order,
    "statements": statements,
}
