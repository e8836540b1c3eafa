"""Copies that take the updates of each chat in their order: none passes another, none is lost."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

from tests.models import Entry, Errand
from tests.race.workers import Copies, workers

WORKERS, ROWS, CHATS = 3, 600, 40


@pytest.fixture(scope="module")
def team(django_db_setup: None) -> Iterator[Copies]:
    with workers(WORKERS) as team:
        yield team


def updates(*, hot: float) -> list[Errand]:
    """Make updates of chats in a random order; the part ``hot`` of them is in one chat."""
    rng = random.Random(11)  # noqa: S311  # no secret
    places = [0 if rng.random() < hot else rng.randrange(CHATS) for _ in range(ROWS)]
    Errand.objects.bulk_create([Errand(place=place) for place in places])
    return list(Errand.objects.order_by("pk"))


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("hot", [0.0, 0.9])
@pytest.mark.parametrize("name", ["transactional", "at_most_once", "at_least_once"])
def test_the_updates_of_each_chat_are_handled_in_their_order(
    team: Copies, name: str, hot: float
) -> None:
    rows = updates(hot=hot)
    handled = team.race(f"chat_{name}")
    assert sorted(pk for each in handled for pk in each) == [row.pk for row in rows]
    assert not Errand.objects.filter(done=False).exists()
    expected: dict[int, list[Any]] = defaultdict(list)
    found: dict[int, list[Any]] = defaultdict(list)
    for row in rows:
        expected[row.place] += [(row.pk, True), (row.pk, False)]
    for place, *entry in Entry.objects.order_by("pk").values_list("place", "errand", "begins"):
        found[place].append(tuple(entry))
    assert found == expected
