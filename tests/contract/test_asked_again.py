"""Runs of one processor in one process, which share what was compiled for the same question."""

from __future__ import annotations

from typing import Any

import pytest
from django.db.models import Q, QuerySet

from dcl_processor import BatchProcessor, Delivery, Lease
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True)


class Asked(BatchProcessor[Errand]):
    """Asks for the errands of one place; ``seen`` has the columns that its handler was given."""

    done = {"done": True}

    def __init__(self, **options: Any) -> None:
        super().__init__(name="tests.asked", **options)
        self.place, self.columns, self.seen = 0, list[str](), list[set[str]]()

    def pending(self) -> QuerySet[Errand]:
        return Errand.objects.filter(done=False, place=self.place).only("done", *self.columns)

    def process(self, row: Errand) -> None:
        self.seen.append({*vars(row)} & {"result", "code"})


@pytest.fixture(params=[*Delivery])
def asked(request: pytest.FixtureRequest) -> Asked:
    Errand.objects.bulk_create(Errand(place=place) for place in (0, 0, 1, 1, 1))
    lease = Lease(60) if request.param == Delivery.AT_LEAST_ONCE else None
    return Asked(delivery=request.param, lease=lease)


def open_places() -> list[int]:
    return [*Errand.objects.filter(done=False).order_by("place").values_list("place", flat=True)]


def test_a_value_that_changes_between_runs_is_asked_anew(asked: Asked) -> None:
    assert asked.run().processed == 2
    asked.place = 1
    assert asked.run().processed == 3
    assert open_places() == []


def test_a_filter_of_one_run_is_not_asked_in_the_next(asked: Asked) -> None:
    first = Errand.objects.earliest("pk")
    assert asked.run(filter=Q(pk=first.pk)).processed == 1
    assert open_places() == [0, 1, 1, 1]
    assert asked.run().processed == 1
    assert open_places() == [1, 1, 1]


def test_rows_have_the_columns_that_their_own_run_asked_for(asked: Asked) -> None:
    asked.run(limit=1)
    asked.columns = ["result", "code"]
    asked.run(limit=1)
    assert asked.seen == [set(), {"result", "code"}]
