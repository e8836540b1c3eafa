"""The order of moves in a race: an opening that forces two classic mistakes, then seeded turns."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator

from .turns import Kind, Standing

#: The most steps that one worker takes in a part of the opening.
MOST = 200

Schedule = Generator[int, Standing, None]


def seeded(copies: int, seed: int) -> Callable[[Standing], int]:
    """Return a function that picks one of the workers that stand before a step."""
    schedule: Schedule | None = None

    def choose(standing: Standing) -> int:
        nonlocal schedule
        if schedule is None:
            schedule = _turns(copies, random.Random(seed), standing)  # noqa: S311  # no secret
            return next(schedule)
        return schedule.send(standing)

    return choose


def _turns(copies: int, rng: random.Random, standing: Standing) -> Schedule:
    # All workers read their candidates before any worker locks one.
    for copy in range(1, copies + 1):
        while copy in standing and standing[copy].kind is Kind.READ:
            standing = yield copy
    # The first worker has handled a row and holds its lock, while the second comes to the same row:
    # a worker that does not lock handles it, too.
    standing = yield from _until(1, {Kind.RETURNS}, standing)
    if copies > 2:
        standing = yield from _until(2, {Kind.RETURNS, Kind.WAITS}, standing)
    # The first worker has finished its row, and the last one comes to it with the candidates from
    # its first read: a worker that does not ask again handles it, too.
    standing = yield from _until(1, {Kind.SETTLED}, standing)
    standing = yield from _until(copies, {Kind.RETURNS, Kind.WAITS}, standing)
    copy = copies
    while True:
        # In bursts: a worker that alternates with others at each step rarely ends a row alone.
        if copy not in standing or rng.random() < 0.5:  # a coin
            copy = rng.choice(sorted(standing))
        standing = yield copy


def _until(copy: int, kinds: set[Kind], standing: Standing) -> Generator[int, Standing, Standing]:
    """Let one worker move until it stands before a step of these kinds, or has ended."""
    for _ in range(MOST):
        if copy not in standing or standing[copy].kind in kinds:
            break
        standing = yield copy
    return standing
