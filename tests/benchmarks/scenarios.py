"""What is measured; each scenario's rows are a multiple of the unit (ROWS=, 1,000 by default)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from django.db import connection
from django.db.models import Q

from . import rows
from .contenders import (
    ARTICLE,
    BATCH,
    BY_HAND,
    COMMAND,
    CONCURRENT,
    IN_ORDER,
    LOCKS,
    OURS,
    SMALL,
    SMALL_COMMAND,
    SPANNING,
    WATCHED,
    WITH_FAILURES,
)
from .contenders.raw import connect
from .measuring import Bench, Measurement, alone, drain, take_turns
from .network import COUNTED, NETWORKS

SLOW = 0.005  # seconds that the handler takes where workers are to gain something


ONE_BY_ONE = (
    OURS,
    COMMAND,
    "at most once, batch 1",
    "at least once, batch 1",
    ARTICLE,
    "raw statements, batch 1",
    "raw prepared statements, batch 1",
    "raw claim, batch 1",
    "raw prepared claim, batch 1",
    "pgbench claim",
)
BATCHES = (
    BATCH,
    "transactional, batch 500",
    "raw statements, batch 100",
    "raw statements, batch 500",
    "raw claim, batch 100",
    "raw claim, batch 500",
    "raw claim at the head, batch 500",
    "pgqueuer, batch 100",
)
QUEUES = ("django-tasks-db", "procrastinate", "procrastinate, concurrency 10", "django-mailer")


def one_by_one(bench: Bench) -> None:
    """One worker, one commit for each row, a handler that does nothing."""
    take_turns(_more(bench), "one-by-one", ONE_BY_ONE, bench.unit)


def small(bench: Bench) -> None:
    """Handle one row in each run, and measure the time of a run and what it sends."""
    number = max(bench.unit // 10, 10)
    names = (BY_HAND, *SMALL.values(), *SMALL_COMMAND.values())
    take_turns(_more(bench), "small", names, number)
    take_turns(replace(bench, rounds=1), "small", names, number, networks=(COUNTED,))


def batches(bench: Bench) -> None:
    """One worker, many rows for each commit, a handler that does nothing."""
    take_turns(_more(bench), "batches", BATCHES, 20 * bench.unit)


def watched(bench: Bench) -> None:
    """One worker, a handler that takes 5 ms, and all that can be noted of each row, or nothing."""
    take_turns(_more(bench), "watched", (OURS, WATCHED), bench.unit, delay=SLOW)


def extras(bench: Bench) -> None:
    """One worker, and what costs it something beside its rows: failures."""
    take_turns(_more(bench), "extras", (OURS, ARTICLE), bench.unit)
    more = (BATCH, WITH_FAILURES, "raw statements, batch 100")
    take_turns(_more(bench), "extras", more, 10 * bench.unit)


def queues(bench: Bench) -> None:
    """One worker each, with one commit or more for each row, and one or ten handlers in flight."""
    number = max(bench.unit // 2, 10)
    take_turns(_more(bench), "queues", (OURS, CONCURRENT, *QUEUES), number)


def in_order(bench: Bench) -> None:
    """Rows of a hundred keys, each key's in order, and twenty handlers in flight of 50 ms each."""
    delay = 10 * SLOW
    take_turns(bench, "in order", (IN_ORDER, LOCKS), bench.unit, delay=delay)
    counted: dict[str, Any] = {"delay": delay, "networks": (COUNTED,)}
    take_turns(_fewer(bench), "statements", (IN_ORDER,), bench.unit, **counted)


def network(bench: Bench) -> None:
    """One worker, on the socket and through delays; fewer rows, as most take several delays."""
    fewer, networks = _fewer(bench), tuple(NETWORKS)
    singles = (*ONE_BY_ONE, SPANNING, "raw claim at the head, batch 1", CONCURRENT, *QUEUES)
    take_turns(fewer, "network", singles, max(bench.unit // 5, 10), networks=networks)
    take_turns(fewer, "network-batches", BATCHES, 5 * bench.unit, networks=networks)


def workers(bench: Bench) -> None:
    """Racing workers, each in a process of its own, and a handler that takes 5 ms."""
    number = max(bench.unit * 2 // 3, 2)
    for together in bench.workers:
        # With many workers the loop by hand takes minutes.
        rounds = (bench.rounds + 1) // (2 if together <= 16 else 3)
        fewer = replace(bench, rounds=max(rounds, 1))
        take_turns(fewer, "workers", (OURS, ARTICLE), number, workers=together, delay=SLOW)


def statements(bench: Bench) -> None:
    """Count what racing workers say to the server, message by message."""
    fewer = _fewer(bench)
    for together in bench.workers:
        for name in (OURS, SPANNING):
            delay = SLOW if together > 1 else 0.0
            how: dict[str, Any] = {"workers": together, "delay": delay, "networks": (COUNTED,)}
            take_turns(fewer, "statements", (name,), 5 * bench.unit, **how)


def backlog(bench: Bench) -> None:
    """Take as many rows out of many: from the head, the middle and the tail."""
    for round_ in range(_fewer(bench).rounds):
        turns = [_small_backlog, _large_backlog]
        for turn in turns if round_ % 2 == 0 else reversed(turns):
            turn(bench, round_ + 1)


def _small_backlog(bench: Bench, round_: int) -> None:
    number = 20 * bench.unit
    rows.fill(number)
    figures = alone(BATCH, range(1, number + 1))
    bench.note(Measurement("backlog", f"{BATCH}, out of {number}", 1, round_, number, figures))


def _large_backlog(bench: Bench, round_: int) -> None:
    number, many = 20 * bench.unit, 1_000 * bench.unit
    places = {"head": 0, "middle": many // 2, "tail": many - number}
    rows.fill(many)
    left = many
    for place, after in places.items():
        left -= number
        rows.settle_down(rows.TABLE)
        expected = range(after + 1, after + number + 1)
        options: dict[str, Any] = {"limit": number}
        if after:
            options["filter"] = Q(pk__gt=after)
        figures = alone(BATCH, expected, left=left, options=options)
        what = f"{BATCH}, {place} of {many}"
        bench.note(Measurement("backlog", what, 1, round_, number, figures))


def snapshot(bench: Bench) -> None:
    """After many flips, with and without an old snapshot that keeps the dead rows in place."""
    flips = 100 * bench.unit
    numbers = {OURS: 2 * bench.unit, "raw claim at the head, batch 1": max(bench.unit // 5, 2)}
    for round_ in range(_fewer(bench).rounds):
        for name, number in numbers.items():
            for pinned in (False, True) if round_ % 2 == 0 else (True, False):
                rows.fill(flips + number)
                with _old_snapshot() if pinned else nullcontext():
                    _flip(flips)
                    figures = drain(bench.members, name, range(flips + 1, flips + number + 1))
                what = f"{name}, {'old snapshot' if pinned else 'no old snapshot'}"
                bench.note(Measurement("snapshot", what, 1, round_ + 1, number, figures))


def _flip(number: int) -> None:
    """Flip the first rows, as a processor with batches of 500 would."""
    with connection.cursor() as cursor:
        for start in range(0, number, 500):
            cursor.execute(
                f"UPDATE {rows.TABLE} SET done = true WHERE id > %s AND id <= %s",  # noqa: S608  # constant
                [start, min(start + 500, number)],
            )


@contextmanager
def _old_snapshot() -> Iterator[None]:
    """Keep a transaction open that may still want to read everything as it is now."""
    with connect(prepared=False) as driver, driver.transaction():
        driver.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        driver.execute("SELECT 1")
        yield


def _fewer(bench: Bench) -> Bench:
    """Return the same bench with fewer rounds, for what takes long."""
    return replace(bench, rounds=(bench.rounds + 1) // 2)


def _more(bench: Bench) -> Bench:
    """Return the same bench with more rounds: many short turns even out a machine's moods."""
    return replace(bench, rounds=2 * bench.rounds if bench.rounds > 1 else 1)


SCENARIOS: Mapping[str, Callable[[Bench], None]] = {
    "one-by-one": one_by_one,
    "small": small,
    "batches": batches,
    "extras": extras,
    "watched": watched,
    "queues": queues,
    "in order": in_order,
    "network": network,
    "workers": workers,
    "statements": statements,
    "backlog": backlog,
    "snapshot": snapshot,
}
