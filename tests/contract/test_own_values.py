"""Flips with another value for each row: one statement for all of them."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from contextlib import ExitStack
from datetime import date, time, timedelta
from decimal import Decimal
from threading import Event
from typing import Any

import pytest
from django.db import connection, transaction
from django.db.models import F

from dcl_processor import BatchProcessor, Delivery, Lease, batch_processor
from dcl_processor.compiled_sql import own_values
from dcl_processor.runner.counters import Counters
from dcl_processor.settlement import grouping
from tests.contract.support import errands as the
from tests.contract.support.batches import statements
from tests.contract.support.deadlocks import wait_until_a_session_waits
from tests.contract.support.gate import HAS_ROW_LOCKS
from tests.contract.support.reports import assert_run
from tests.models import Errand, Express, Sample

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


@pytest.fixture(autouse=True)
def _the_first_row_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rows begin together whose flips ask for a result, as they do after a run's first row."""
    monkeypatch.setattr(Counters, "is_to_be_careful", False)


Make = Callable[..., BatchProcessor[Any]]


def transactional(pending: Any, results: Any, **options: Any) -> BatchProcessor[Any]:
    """Make a processor whose rows get the results in their order, as the values of their flips."""

    def handle(rows: Any) -> list[Any]:
        return [results[row.pk] for row in rows]

    options = {"done": lambda row, result: result, "batch_size": 100, **options}
    return batch_processor(pending=pending, **{"process_batch": handle, **options})(the.ignore)


def at_least_once(pending: Any, results: Any, **options: Any) -> BatchProcessor[Any]:
    options = {"delivery": Delivery.AT_LEAST_ONCE, "lease": Lease(60), **options}
    return transactional(pending, results, **options)


both = pytest.mark.parametrize("make", [transactional, at_least_once])


def updates(seen: list[str], table: str) -> list[str]:
    """Return the flips among the statements, the claim's own update excepted."""
    found = [sql for sql in seen if f'UPDATE "{table}"' in sql.replace("`", '"')]
    return [sql for sql in found if "RETURNING" not in sql or "dcl_flipped" in sql]


def flips_of(make: Make, results: dict[Any, Any], **options: Any) -> tuple[Any, list[str]]:
    """Run over errands; return the report and the statements that wrote results."""
    with statements() as seen:
        report = make(the.PENDING, results, **options)()
    return report, [sql for sql in updates(seen, "tests_errand") if "result" in of_set(sql)]


def of_set(sql: str) -> str:
    return sql.partition("WHERE")[0]


def results() -> list[str]:
    return list(Errand.objects.order_by("place").values_list("result", flat=True))


@both
def test_each_set_of_columns_is_one_statement(make: Make) -> None:
    rows = the.errands(12)
    given: dict[Any, Any] = {}
    for row in rows:
        given[row.pk] = {"done": True, "result": str(row.place)}
        if row.place % 2:
            given[row.pk] |= {"last_error": f"late {row.place}"}
        if row.place % 3 == 0:
            given[row.pk] = dict(reversed(given[row.pk].items()))  # the order does not matter
    report, flips = flips_of(make, given)
    assert_run(report, processed=12)
    assert results() == [str(place) for place in range(12)]
    late = Errand.objects.order_by("place").values_list("last_error", flat=True)
    assert list(late) == [f"late {place}" * (place % 2) for place in range(12)]
    assert len(flips) == 2


SAMPLES: dict[str, list[Any]] = {
    "price": [Decimal("1.50"), Decimal("-20.00"), None],
    "day": [date(2026, 1, 31), None, date(1900, 2, 28)],
    "hour": [time(1, 2, 3, 456_789), None, time(0)],
    "span": [timedelta(days=3, microseconds=7), timedelta(-1), None],
    "colour": ["red", "blue", "red"],
    "word": ["shout", None, "é'%s\\"],
    "token": [uuid.UUID(int=7), None, uuid.UUID(int=2**127)],
    "ratio": [0.1, -1e30, None],
    "data": [{"a": [1, None, "x%s"]}, [], None],
    "raw": [b"\x00\xff%s", None, b""],
    "address": ["10.0.0.1", "2001:db8::1", None],
}


@both
@pytest.mark.parametrize("name", SAMPLES)
def test_every_field_stores_what_it_stores_alone(make: Make, name: str) -> None:
    values = SAMPLES[name]
    alone = [Sample.objects.create() for _ in values]
    for row, value in zip(alone, values, strict=True):
        Sample.objects.filter(pk=row.pk).update(**{name: value}, done=True)
    rows = [Sample.objects.create() for _ in values]
    given = {row.pk: {"done": True, name: value} for row, value in zip(rows, values, strict=True)}
    with statements() as seen:
        report = make(Sample.objects.filter(done=False), given)()
    assert_run(report, processed=len(values))
    stored = Sample.objects.order_by("pk").values_list(name, flat=True)
    found = [bytes(each) if isinstance(each, memoryview) else each for each in stored]
    assert found[3:] == found[:3]
    flips = [sql for sql in updates(seen, "tests_sample") if f"{name}" in of_set(sql)]
    # Django adds SQL of its own around the value of a BinaryField.
    assert len(flips) == (3 if name == "raw" else 1)


def test_a_claim_in_another_table_is_compared_all_the_same() -> None:
    """The claim is the parent's, and the flip writes columns of the child alone."""
    rows = [Express.objects.create() for _ in range(3)]
    given = {
        row.pk: {"attempts": place + 1, "last_error": f"sent {place}"}
        for place, row in enumerate(rows)
    }
    options: dict[str, Any] = {"delivery": Delivery.AT_MOST_ONCE, "claim": {"claimed": True}}
    with statements() as seen:
        pending = Express.objects.filter(attempts=0, claimed=False)
        assert_run(transactional(pending, given, **options)(), processed=3)
    assert not [sql for sql in seen if "VALUES" in sql or "CASE" in sql]
    stored = Express.objects.order_by("pk").values_list("attempts", "last_error")
    assert list(stored) == [(1, "sent 0"), (2, "sent 1"), (3, "sent 2")]


def few_parameters(patch: pytest.MonkeyPatch) -> None:
    # Some versions of Django keep it on the instance when it was read.
    patch.delitem(vars(connection.features), "max_query_params", raising=False)
    patch.setattr(type(connection.features), "max_query_params", 121)


def few_characters(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(grouping, "MOST_CHARACTERS", 20)


@both
@pytest.mark.parametrize(("limit", "number"), [(few_parameters, 16), (few_characters, 9)])
def test_a_statement_is_no_larger_than_a_server_takes(
    make: Make, limit: Any, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is of 7 rows at most, or of 3."""
    limit(monkeypatch)
    rows = the.errands(number)
    given = {row.pk: {"done": True, "result": f"sent {row.place}"} for row in rows}
    report, flips = flips_of(make, given)
    assert_run(report, processed=number)
    assert results() == [f"sent {place}" for place in range(number)]
    assert len(flips) == 3


def test_a_field_that_takes_an_expression_for_a_value_is_written_row_by_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As an encrypting field does that does not know about expressions."""
    field = Errand._meta.get_field("result")
    real = type(field).get_db_prep_save

    def encrypt(value: Any, connection: Any) -> Any:
        return f"<{real(field, value, connection)}>"

    monkeypatch.setattr(field, "get_db_prep_save", encrypt)
    assert not own_values.OwnColumn(Errand, "default", "result").fits
    rows = the.errands(4)
    given = {row.pk: {"done": True, "result": f"sent {row.place}"} for row in rows}
    assert_run(at_least_once(the.PENDING, given)(), processed=4)
    assert results() == [f"<sent {place}>" for place in range(4)]


if HAS_ROW_LOCKS:

    @pytest.mark.parametrize("is_lost", [False, True], ids=["changed", "taken over"])
    def test_a_row_that_another_session_changes_meanwhile(is_lost: bool) -> None:
        """The statement waits for the lock, and checks the new version of the row alone."""
        rows = the.errands(4)
        changed = Event()

        def change() -> None:
            with transaction.atomic():
                mine = Errand.objects.filter(pk=rows[1].pk)
                mine.update(last_error="noted meanwhile")
                if is_lost:
                    mine.update(leased_until=F("leased_until") + timedelta(hours=1))
                changed.set()
                wait_until_a_session_waits()

        def handle(given: list[Errand]) -> list[str]:
            block.enter_context(the.meanwhile(change))
            the.wait(changed)
            return [f"sent {row.place}" for row in given]

        def done(row: Errand, result: str) -> dict[str, Any]:
            return {"done": True, "result": result}

        run = the.at_least_once(the.ignore, process_batch=handle, done=done, batch_size=9)
        with ExitStack() as block:
            report = run()
        assert_run(report, processed=4 - is_lost, lease_lost=int(is_lost))
        expected = [f"sent {place}" for place in range(4)]
        if is_lost:
            expected[1] = ""
        assert results() == expected
        assert [the.state(row)["leased_until"] for row in rows] == [False, is_lost, False, False]
        assert Errand.objects.get(pk=rows[1].pk).last_error == "noted meanwhile"
