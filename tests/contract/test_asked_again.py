"""Questions that are asked again: in one process, and beside a cache of answers."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db.models import Q, QuerySet

from dcl_processor import BatchProcessor, Delivery, Lease
from tests.contract.support import errands as the
from tests.contract.support.reports import assert_run
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


# --- beside a cache that remembers answers by their SQL, as several packages bring one


@pytest.fixture
def _cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer each question from memory the second time, except one that is for a write.

    Nothing is forgotten, as if each write came from another machine, or went past the ORM.
    """
    remembered = dict[Any, Any]()

    def caching(name: str) -> Callable[..., Any]:
        original = getattr(QuerySet, name)

        def remember(rows: Any, *arguments: Any) -> Any:
            if rows._for_write:
                return original(rows, *arguments)
            kind = (name, rows._iterable_class, arguments, rows._fields)
            known = (*kind, str(rows.query), rows.db)
            if name == "_fetch_all":
                if rows._result_cache is None and known in remembered:
                    rows._result_cache = [*remembered[known]]
                original(rows)
                remembered[known] = [*rows._result_cache]
                return None
            if known not in remembered:
                remembered[known] = original(rows, *arguments)
            return remembered[known]

        return remember

    for name in ("_fetch_all", "count", "exists"):
        monkeypatch.setattr(QuerySet, name, caching(name))


@pytest.mark.usefixtures("_cached")
@the.all_deliveries
@pytest.mark.parametrize("batch_size", [1, 3])
@the.each_question
def test_no_claim_is_answered_by_it(make: the.Make, batch_size: int, question: Any) -> None:
    the.errands(7)
    handled: list[int] = []
    run = make(lambda row: handled.append(row.place), batch_size=batch_size, pending=question())
    assert_run(run(), processed=7)
    assert sorted(handled) == [*range(7)]
    Errand.objects.update(done=False, claimed=False, claimed_at=None)
    assert_run(run(), processed=7)
    assert sorted(handled) == sorted([*range(7)] * 2)
    assert_run(run())


@pytest.mark.usefixtures("_cached")
def test_rows_in_doubt_are_counted_anew() -> None:
    the.errands(3)
    run = the.at_most_once(the.raising(ValueError()))
    now = timedelta(0)
    assert run.in_doubt(older_than=now).count() == 0
    assert_run(run(), failed=3)
    assert run.in_doubt(older_than=now).count() == 3
