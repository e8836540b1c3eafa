"""How much several workers do."""

from __future__ import annotations

import multiprocessing
import time
from statistics import median
from typing import Any

import django

from tests.production.figures.bench import parcels, processor, say
from tests.waiting import PATIENCE


def _get_ready(barriers: dict[int, Any]) -> None:
    django.setup()
    _barriers.update(barriers)


def _copy(number: int, seconds_each: float) -> float:
    run = processor(handler=lambda row: time.sleep(seconds_each))
    _barriers[number].wait(PATIENCE)
    return float(run.run(wait_for_locked=0).duration)


_barriers: dict[int, Any] = {}


def measure_copies() -> None:
    """Run several workers, by how long the handler waits for something else."""
    spawn = multiprocessing.get_context("spawn")
    numbers = (1, 2, 4, 8, 16)
    barriers = {number: spawn.Barrier(number) for number in numbers}
    with spawn.Pool(max(numbers), _get_ready, (barriers,)) as pool:
        for wait in (0.0, 0.005, 0.05):
            rates: dict[int, list[float]] = {}
            for _ in range(3):
                for number in numbers:
                    rows = 400 if wait < 0.05 else 25 * number
                    parcels(rows, rows)
                    took = pool.starmap(_copy, [(number, wait)] * number, chunksize=1)
                    rates.setdefault(number, []).append(rows / max(took))
            for number in numbers[1:]:
                say(
                    f"{number} workers, handler waits {1000 * wait:g} ms, against one",
                    median(rates[number]) / median(rates[1]),
                )
