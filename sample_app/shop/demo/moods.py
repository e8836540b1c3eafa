"""Which requests a stub does not answer normally: always the same ones for the same orders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import TypeVar

M = TypeVar("M")

SEED = 1


def scatter(orders: Sequence[int], one_in: Mapping[M, int]) -> dict[int, M]:
    """Give each mood to one in ``one_in[mood]`` of the orders, and to at least one of them."""
    moods = [mood for mood, many in one_in.items() for _ in range(max(1, len(orders) // many))]
    if len(orders) < len(moods):
        return {}
    chance = Random(SEED)  # noqa: S311 - nothing here is a secret
    return dict(zip(chance.sample(orders, len(moods)), moods, strict=True))
