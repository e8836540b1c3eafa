"""Who moves next in a race: an opening that forces the two classic mistakes, then seeded turns."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator

from .turns import Kind, Standing

#: Steps that one copy takes in the opening, at most.
MOST = 200

Schedule = Generator[int, Standing, None]


def seeded(copies: int, seed: int) -> Callable[[Standing], int]:
    """Return what picks a copy out of those that stand."""
    schedule: Schedule | None = None

    def choose(standing: Standing) -> int:
        nonlocal schedule
        if schedule is None:
            schedule = _turns(copies, random.Random(seed), standing)  # noqa: S311  # no secret
            return next(schedule)
        return schedule.send(standing)

    return choose


def _turns(copies: int, rng: random.Random, standing: Standing) -> Schedule:
    everybody = range(1, copies + 1)
    # All have their candidates before anybody locks one.
    for copy in everybody:
        while copy in standing and standing[copy].kind is Kind.READ:
            standing = yield copy
    # The first has handled a row and holds its lock, while the second comes to the same row: a
    # copy that does not lock handles it, too.
    standing = yield from _until(1, {Kind.RETURNS}, standing)
    if copies > 2:
        standing = yield from _until(2, {Kind.RETURNS, Kind.WAITS}, standing)
    # The first has finished its row, and the last one comes to it with what it read at the
    # beginning: a copy that does not ask again handles it, too.
    standing = yield from _until(1, {Kind.SETTLED}, standing)
    standing = yield from _until(copies, {Kind.RETURNS, Kind.WAITS}, standing)
    copy = copies
    while True:
        # In bursts: a copy that alternates with others at each step rarely ends a row alone.
        if copy not in standing or rng.random() < 0.5:  # a coin
            copy = rng.choice(sorted(standing))
        standing = yield copy


def _until(copy: int, kinds: set[Kind], standing: Standing) -> Generator[int, Standing, Standing]:
    """Let one copy move until it stands before such a step, or has ended."""
    for _ in range(MOST):
        if copy not in standing or standing[copy].kind in kinds:
            break
        standing = yield copy
    return standing
