"""The SQL that a run sends, its plan, and the index that serves it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.db.models import Index, Model, Q, QuerySet
from django.db.models.functions import Now
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from dcl_processor import BatchProcessor, Delivery, Lease, Retry, batch_processor
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


# --- the index that serves a question

SHAPES: dict[str, tuple[Callable[[], BatchProcessor[Any]], type[Model], dict[str, Any]]] = {
    # name: the processor, its model, and the columns of rows that are done
    "a flag": (
        lambda: processor(lambda: Parcel.objects.filter(sent=False)),
        Parcel,
        {"sent": True},
    ),
    "a nullable time": (
        lambda: processor(lambda: Parcel.objects.filter(sent_at=None), done={"sent_at": Now()}),
        Parcel,
        {"sent_at": NOW},
    ),
    "retry and lease": (
        lambda: processor(
            lambda: Errand.objects.filter(done=False, dead=False),
            done={"done": True},
            failed={"dead": True},
            delivery=Delivery.AT_LEAST_ONCE,
            lease=Lease(60),
            retry=Retry(),
        ),
        Errand,
        {"done": True},
    ),
    "the own part of a spanning question": (
        lambda: processor(lambda: Parcel.objects.filter(sent=False, depot__open=True)),
        Parcel,
        {"sent": True},
    ),
    "the queryset's order": (
        lambda: processor(lambda: Parcel.objects.filter(sent=False).order_by("-priority")),
        Parcel,
        {"sent": True},
    ),
}


def fill(model: type[Model], done: dict[str, Any]) -> None:
    depot: dict[str, Any] = {"depot": Depot.objects.create(name="north")} if model is Parcel else {}
    rows: Any = model._default_manager
    rows.bulk_create([model(**depot, **done) for _ in range(ROWS)])
    rows.bulk_create([model(**depot) for _ in range(5)])


@pytest.mark.parametrize("shape", SHAPES)
def test_the_suggested_index_serves_the_read(shape: str) -> None:
    """The plan of the same read uses it; before, none did."""
    make, model, done = SHAPES[shape]
    fill(model, done)
    analyze(model)
    before = explanation(make())
    (index,) = before.indexes
    assert before.index is None
    with created(index, model):
        after = explanation(make())
        assert index.name in "\n".join(after.plan), after.plan
        assert after.read == before.read
        assert before.verdict.startswith("No index serves this read")
        assert after.verdict == f"The index {index.name} serves this read."
        assert (after.index, after.indexes) == (index.name, ())
        assert make()(limit=1).processed == 1


def test_a_column_that_is_compared_with_the_time_is_indexed_itself() -> None:
    Parcel.objects.bulk_create(Parcel(sent_at=NOW + timedelta(days=9)) for _ in range(ROWS))
    Parcel.objects.bulk_create(Parcel(sent_at=NOW - timedelta(days=2)) for _ in range(5))
    due = processor(lambda: Parcel.objects.filter(sent_at__lte=NOW), done={"sent_at": None})
    (index,) = explanation(due).indexes
    assert (index.fields, index.condition) == (["sent_at", "id"], None)
    with created(index, Parcel):
        after = explanation(due)
    assert index.name in "\n".join(after.plan), after.plan


def test_no_index_holds_a_condition_on_another_table() -> None:
    found = explanation(processor(lambda: Parcel.objects.filter(depot__open=True)))
    assert found.indexes == ()
    assert "No index of tests.Parcel can hold a condition of pending" in found.verdict


# --- the statements, as they are sent


def test_the_read_is_the_one_that_a_run_sends_and_nothing_is_written() -> None:
    for _ in range(4):
        Parcel.objects.create()
    spanning = processor(lambda: Parcel.objects.filter(sent=False).exclude(depot__open=True))
    with CaptureQueriesContext(connection) as asked:
        found = explanation(spanning)
    assert [q["sql"] for q in asked.captured_queries if q["sql"] and not reads(q["sql"])] == []
    with CaptureQueriesContext(connection) as sent:
        assert spanning().processed == 4
    assert found.read in [query["sql"] for query in sent.captured_queries]


def reads(sql: str) -> bool:
    """Return whether a statement locks and writes nothing."""
    of_transactions = ("BEGIN", "COMMIT", "ROLLBACK", "SAVEPOINT", "RELEASE")
    plain = ("SELECT", "EXPLAIN", "PRAGMA", "SHOW", "SET", *of_transactions)
    sql = sql.strip()
    return sql.startswith(plain) and (sql.startswith("EXPLAIN") or "FOR UPDATE" not in sql)


# --- the indexes that serve the keys of groups

LEASED: dict[str, Any] = {"delivery": Delivery.AT_LEAST_ONCE, "lease": Lease(60)}
CLAIMED: dict[str, Any] = {
    "delivery": Delivery.AT_MOST_ONCE,
    "claim": {"claimed": True},
    "claimed_at": "claimed_at",
}

KEYED: dict[str, tuple[Callable[[], QuerySet[Any]], dict[str, Any]]] = {
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


@pytest.mark.parametrize("shape", KEYED)
def test_the_suggested_indexes_of_keys_are_used(shape: str) -> None:
    Errand.objects.bulk_create(
        Errand(place=n % 3_000, done=n % 3_000 > 2, attempts=n % 7) for n in range(4 * ROWS)
    )
    analyze(Errand)
    processor = grouped(*KEYED[shape])
    before = explanation(processor)
    assert before.index is None
    with ExitStack() as stack:
        for index in before.indexes:
            stack.enter_context(created(index, Errand))
        after = explanation(processor)
        assert after.index == before.indexes[0].name, after.plan
        assert before.indexes[0] not in after.indexes
