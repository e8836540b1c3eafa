"""Copies that take rows in batches: each row is worked on and flipped once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from tests.models import Parcel
from tests.race.copies import Copies, copies

COPIES, ROWS, RACES = 4, 1_000, 5


@pytest.fixture(scope="module")
def team(django_db_setup: None) -> Iterator[Copies]:
    with copies(COPIES) as team:
        yield team


@pytest.mark.timeout(300)
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("race", range(RACES))
def test_every_row_of_a_batch_is_handled_once_and_its_work_is_kept(team: Copies, race: int) -> None:
    Parcel.objects.bulk_create([Parcel() for _ in range(ROWS)])

    handled = team.race("batches")

    calls = Counter(pk for share in handled for pk in share)
    assert set(calls.values()) == {1}
    assert len(calls) == ROWS
    assert Parcel.objects.filter(sent=True, tries=1).count() == ROWS
    assert min(len(share) for share in handled) > 0
