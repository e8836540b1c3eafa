"""Eight processes at once, four times over, or ``RACES`` times."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

import pytest
from django.db import connection

from tests.models import Depot, Parcel
from tests.race.copies import Copies, copies

COPIES, ROWS = 8, 2_000
RACES = int(os.environ.get("RACES", "4"))


@pytest.fixture(scope="module")
def team(django_db_setup: None) -> Iterator[Copies]:
    with copies(COPIES) as team:
        yield team


@pytest.mark.timeout(600)
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("race", range(RACES))
def test_every_row_is_handled_once_and_every_copy_gets_a_share(team: Copies, race: int) -> None:
    depot = Depot.objects.create()
    Parcel.objects.bulk_create([Parcel(depot=depot) for _ in range(ROWS)])

    handled = team.race("spanning" if race % 4 == 3 else "own_table")

    calls = Counter(pk for share in handled for pk in share)
    assert max(calls.values()) == 1
    assert set(calls) == set(Parcel.objects.values_list("pk", flat=True))
    assert not Parcel.objects.filter(sent=False).exists()
    assert min(len(share) for share in handled) > 0
    assert connection.in_atomic_block is False
