"""One row's way through the package does not get longer."""

from __future__ import annotations

import pytest

from tests.calls import calls_of_a_batched_row, ways

pytestmark = pytest.mark.django_db(transaction=True)

#: Calls and files at most.
MOST = {
    "transactional": (50, 22),
    "transactional, spanning": (58, 22),
    "at most once": (55, 24),
    "at least once": (67, 27),
}


def test_a_row_takes_no_more_calls_and_files_than_it_did() -> None:
    found = ways()
    assert found.keys() == MOST.keys()
    longer = {
        name: (len(way.calls), way.files)
        for name, way in found.items()
        if len(way.calls) > MOST[name][0] or way.files > MOST[name][1]
    }
    assert not longer


def test_a_row_of_a_batch_takes_few_calls_django_and_driver_included() -> None:
    assert calls_of_a_batched_row(500) <= 40
