"""``processors explain`` suggests indexes for keys that are really used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import connection
from django.db.models import Index, Model, Q, QuerySet
from django.db.models.functions import Now

from dcl_processor import BatchProcessor, Delivery, Lease, Retry, batch_processor
from dcl_processor.insights.explanation import explanation
from tests.edge.manage import execute
from tests.models import Errand, Trailer

pytestmark = pytest.mark.django_db(transaction=True)

#: Rows: so many that the plan does not depend on how full the table's pages are.
ROWS = 20_000

LEASED: dict[str, Any] = {"delivery": Delivery.AT_LEAST_ONCE, "lease": Lease(60)}
CLAIMED: dict[str, Any] = {
    "delivery": Delivery.AT_MOST_ONCE,
    "claim": {"claimed": True},
    "claimed_at": "claimed_at",
}

SHAPES: dict[str, tuple[Callable[[], QuerySet[Any]], dict[str, Any]]] = {
    "a flag": (lambda: Errand.objects.filter(done=False), {}),
    "an order": (lambda: Errand.objects.filter(done=False).order_by("-attempts", "place"), LEASED),
    "an order that is kept": (
        lambda: Errand.objects.filter(done=False).order_by("attempts"),
        {"in_order": True, "retry": Retry(), "failed": {"dead": True}},
    ),
    "a claim, and conditions that are negated": (
        lambda: Errand.objects.filter(~Q(done=True, place__lt=5), done=False, claimed=False),
        CLAIMED,
    ),
    "an alternative": (
        lambda: Errand.objects.filter(Q(done=False, place__lt=5) | Q(dead=True), result=""),
        {},
    ),
    "a time that moves": (
        lambda: Errand.objects.filter(Q(leased_until=None) | Q(leased_until__lt=Now()), done=False),
        LEASED,
    ),
}


def grouped(pending: Callable[[], QuerySet[Any]], options: dict[str, Any]) -> BatchProcessor[Any]:
    options = {"group_by": "place", "done": {"done": True}, **options}
    return batch_processor(pending=pending, **options)(lambda row: None)


@contextmanager
def created(indexes: list[Index], model: type[Model]) -> Iterator[None]:
    """Have the indexes in the database, and the statistics of their table up to date."""
    with connection.schema_editor() as editor:
        for index in indexes:
            editor.add_index(model, index)
    try:
        execute("VACUUM ANALYZE tests_errand")
        yield
    finally:
        with connection.schema_editor() as editor:
            for index in indexes:
                editor.remove_index(model, index)


def test_a_key_in_the_table_of_a_parent_has_its_index_there() -> None:
    rows = Trailer.objects.filter(inspected=False, axles=2).order_by("axles", "plate")
    by_plate = grouped(lambda: rows, {"group_by": "plate", "done": {"inspected": True}})
    found = explanation(by_plate)
    assert found.index is not None
    assert found.index_model._meta.label == "tests.Vehicle"
    assert (found.index.fields, found.index.condition) == (["plate", "id"], None)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_suggested_indexes_are_used(shape: str) -> None:
    Errand.objects.bulk_create(
        Errand(place=n % 3_000, done=n % 3_000 > 2, attempts=n % 7) for n in range(ROWS)
    )
    execute("VACUUM ANALYZE tests_errand")
    processor = grouped(*SHAPES[shape])
    before = explanation(processor)
    assert before.index is not None
    both = [index for index in (before.index, before.in_flight_index) if index is not None]
    with created(both, Errand):
        after = explanation(processor)
        assert after.plan is not None
        assert after.plan.index == before.index.name, after.plan.lines
        assert after.index is None
