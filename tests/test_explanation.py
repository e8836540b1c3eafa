"""The SQL that a run sends, its plan, and the index that serves it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, models
from django.db.models import Index, Model, Q, QuerySet
from django.db.models.functions import Now
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from dcl_processor import BatchProcessor, Delivery, Lease, batch_processor
from dcl_processor.insights.explanation import explanation
from tests.contract.support.temporary import execute
from tests.models import Depot, Errand, Parcel

pytestmark = pytest.mark.django_db(transaction=True)

#: Rows: enough for PostgreSQL to prefer an index to the table.
ROWS = 5_000
NOW = timezone.now()


def processor(rows: Callable[[], QuerySet[Any]], **options: Any) -> BatchProcessor[Any]:
    options.setdefault("done", {"sent": True})
    return batch_processor(pending=rows, **options)(lambda row: None)


@contextmanager
def created(index: Index, model: type[Model]) -> Iterator[None]:
    """Have the index in the database, and the statistics of its table up to date."""
    # First: PostgreSQL uses no index made over old versions of a row until every transaction of
    # that time has ended, also those of other databases.
    analyze(model)
    with connection.schema_editor() as editor:
        editor.add_index(model, index)
    try:
        analyze(model)
        yield
    finally:
        with connection.schema_editor() as editor:
            editor.remove_index(model, index)


def analyze(model: type[Model]) -> None:
    execute(f"VACUUM ANALYZE {connection.ops.quote_name(model._meta.db_table)}")


def fill(model: type[Model], done: dict[str, Any]) -> None:
    depot: dict[str, Any] = {"depot": Depot.objects.create(name="north")} if model is Parcel else {}
    rows: Any = model._default_manager
    rows.bulk_create([model(**depot, **done) for _ in range(ROWS)])
    rows.bulk_create([model(**depot) for _ in range(5)])


# --- the index that serves a question

PARCELS = Parcel.objects.filter(sent=False)

SHAPES: dict[str, tuple[BatchProcessor[Any], dict[str, Any], list[str], Q | None]] = {
    # name: the processor, the columns of rows that are done, the index's fields and condition
    "a flag": (processor(lambda: PARCELS), {"sent": True}, ["id"], Q(sent=False)),
    "a nullable time": (
        processor(lambda: Parcel.objects.filter(sent_at=None), done={"sent_at": Now()}),
        {"sent_at": NOW},
        ["id"],
        Q(sent_at__isnull=True),
    ),
    "a time that has come": (
        processor(lambda: Parcel.objects.filter(sent_at__lte=Now()), done={"sent_at": None}),
        {"sent_at": NOW + timedelta(days=9)},
        ["sent_at", "id"],
        None,
    ),
    "conditions of which some are not plain": (
        processor(lambda: PARCELS.filter(Q(tries=0) | Q(weight=1), priority__in=[0, 1])),
        {"sent": True},
        ["id"],
        Q(priority__in=[0, 1], sent=False),
    ),
    "the own part of a spanning question": (
        processor(lambda: PARCELS.filter(depot__open=True)),
        {"sent": True},
        ["id"],
        Q(sent=False),
    ),
    "the queryset's order": (
        processor(lambda: PARCELS.order_by("-priority", "depot__name")),
        {"sent": True},
        ["-priority", "id"],
        Q(sent=False),
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_suggested_index_serves_the_read(shape: str) -> None:
    """The plan of the same read uses it."""
    run, done, fields, condition = SHAPES[shape]
    fill(Parcel, done)
    analyze(Parcel)
    before = explanation(run)
    (index,) = before.indexes
    assert (index.fields, index.condition) == (fields, condition)
    with created(index, Parcel):
        after = explanation(run)
        assert index.name in "\n".join(after.plan), after.plan
        assert after.read == before.read


def test_an_index_of_the_meta_is_not_suggested(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Index(fields=["id"], name="own", condition=Q(sent=False))
    monkeypatch.setattr(Parcel._meta, "indexes", [own])
    assert explanation(processor(lambda: PARCELS)).indexes == ()


def test_no_index_is_suggested_for_a_condition_on_another_table() -> None:
    found = explanation(processor(lambda: Parcel.objects.filter(depot__open=True)))
    assert found.indexes == ()
    assert found.plan


def test_the_code_makes_the_index() -> None:
    run = processor(lambda: PARCELS.filter(sent_at=None, note="a 'b'"), name="shop.send")
    found = explanation(run)
    (code,) = found.code()
    made = eval(code, {"models": models})  # noqa: S307  # what users paste
    assert made.deconstruct() == found.indexes[0].deconstruct()
    assert made.name == "pending_send"


# --- the statements, as they are sent


def test_the_read_is_the_one_that_a_run_sends_and_nothing_is_written() -> None:
    for _ in range(4):
        Parcel.objects.create()
    spanning = processor(lambda: Parcel.objects.filter(sent=False).exclude(depot__open=True))
    with CaptureQueriesContext(connection) as asked:
        found = explanation(spanning)
    of_transactions = ("BEGIN", "COMMIT", "ROLLBACK", "SAVEPOINT", "RELEASE")
    for query in asked.captured_queries:
        assert query["sql"].startswith(("EXPLAIN", "SET LOCAL", *of_transactions)), query
    with CaptureQueriesContext(connection) as sent:
        assert spanning().processed == 4
    assert found.read in [query["sql"] for query in sent.captured_queries]


# --- the indexes that serve the keys of groups

KEYED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "rows that are locked": ({}, []),
    "a lease": ({"delivery": Delivery.AT_LEAST_ONCE, "lease": Lease(60)}, ["leased_until"]),
    "fair shares": ({"group_by": None, "fair_by": "place"}, []),
}


@pytest.mark.parametrize("shape", KEYED)
def test_the_suggested_indexes_of_keys_are_used(shape: str) -> None:
    Errand.objects.bulk_create(
        Errand(place=n % 3_000, done=n % 3_000 > 2, attempts=n % 7) for n in range(4 * ROWS)
    )
    analyze(Errand)
    options, marks = KEYED[shape]
    run = processor(
        lambda: Errand.objects.filter(done=False).order_by("attempts"),
        **{"group_by": "place", "done": {"done": True}, **options},
    )
    before = explanation(run)
    first, *others = before.indexes
    assert (first.fields, first.condition) == (["place", "attempts", "id"], Q(done=False))
    assert [each.condition for each in others] == [Q(**{f"{at}__isnull": False}) for at in marks]
    with ExitStack() as stack:
        for index in before.indexes:
            stack.enter_context(created(index, Errand))
        assert first.name in "\n".join(explanation(run).plan)
        assert run(limit=1).processed == 1
