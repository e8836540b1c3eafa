"""Handlers that leave a transaction open where none belongs: nothing is settled in it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, connections, transaction

from dcl_processor import Delivery, Lease, Retry, batch_processor
from dcl_processor.exceptions import TransactionLeftOpen
from tests.contract.support import errands as the
from tests.contract.support.reports import assert_run
from tests.models import Errand, Parcel

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


def execute(sql: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(sql)


def begin_past_django() -> None:
    connection.ensure_connection()
    connection.connection.cursor().execute("BEGIN")


def enter_a_block() -> None:
    transaction.atomic().__enter__()


LEAVES: dict[str, Callable[[], Any]] = {
    "BEGIN": lambda: execute("BEGIN"),
    "BEGIN past Django": begin_past_django,
    "autocommit off": lambda: transaction.set_autocommit(False),
    "a block never left": enter_a_block,
}
if connection.vendor == "mysql":
    LEAVES["the server's autocommit off"] = lambda: execute("SET autocommit = 0")
    LEAVES["START TRANSACTION"] = lambda: execute("/* as ever */ start transaction")
leaves = pytest.mark.parametrize("leave", LEAVES.values(), ids=LEAVES)

OPTIONS: dict[str, dict[str, Any]] = {
    "at most once": {"delivery": Delivery.AT_MOST_ONCE},
    "at most once, claimed": {
        "delivery": Delivery.AT_MOST_ONCE,
        "claim": {"claimed": True},
        "claimed_at": "claimed_at",
    },
    "at least once": {
        "delivery": Delivery.AT_LEAST_ONCE,
        "lease": Lease(60),
        "retry": Retry(backoff=600),
    },
}


@pytest.fixture(autouse=True)
def _afresh() -> Iterator[None]:
    yield
    connection.close()


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@leaves
def test_the_row_that_left_a_transaction_open_fails_and_the_others_are_committed(
    leave: Callable[[], Any], options: dict[str, Any], batch_size: int
) -> None:
    the.errands(4)
    Parcel.objects.create()
    calls: list[int] = []

    def handle(row: Errand) -> None:
        calls.append(row.place)
        if row.place in {0, 2}:
            leave()
            Parcel.objects.update(note=f"row {row.place}")

    # As the claim leaves them: the question of an at-most-once claim is about its mark.
    claims = "claim" in options
    pending = Errand.objects.filter(done=False, **({"claimed": False} if claims else {}))
    processor = batch_processor(
        pending=pending, done={"done": True}, batch_size=batch_size, **options
    )(handle)
    report = processor()
    assert calls == [0, 1, 2, 3]
    assert_run(report, processed=2, failed=2, retried=2 if "retry" in options else 0)
    assert {type(failure.error) for failure in report.failures} == {TransactionLeftOpen}
    assert not connection.in_atomic_block
    assert connection.get_autocommit()
    # What another session sees is committed.
    assert Parcel.objects.using("other").get().note == ""
    rows = Errand.objects.using("other").order_by("place")
    flipped = "claim" not in options and "lease" not in options
    assert list(rows.values_list("done", flat=True)) == [flipped, True, flipped, True]
    if claims:
        with connections["other"].cursor():  # by the database's clock, and by that session
            doubtful = processor.in_doubt(older_than=timedelta(0)).using("other")
        assert sorted(doubtful.values_list("place", flat=True)) == [0, 2]
    if "lease" in options:
        assert list(rows.values_list("attempts", flat=True)) == [1, 0, 1, 0]
        assert set(rows.values_list("leased_until", flat=True)) == {None}


@leaves
def test_what_the_handler_raised_is_the_failure(leave: Callable[[], Any]) -> None:
    the.errands(3)

    def handle(row: Errand) -> None:
        if row.place == 1:
            leave()
            raise ValueError("the handler's own")

    options = OPTIONS["at least once"]
    report = batch_processor(
        pending=Errand.objects.filter(done=False), done={"done": True}, **options
    )(handle)()
    assert_run(report, processed=2, failed=1, retried=1)
    assert str(report.failures[0].error) == "the handler's own"
    rows = Errand.objects.using("other").order_by("place")
    assert list(rows.values_list("done", "attempts")) == [(True, 0), (False, 1), (True, 0)]


def test_one_that_was_left_open_by_other_code_is_rolled_back_before_the_claim(
    caplog: pytest.LogCaptureFixture,
) -> None:
    the.errands(3)

    asked: list[int] = []

    def pending() -> Any:
        asked.append(1)
        if len(asked) == 2:  # for the first window; a run that begins so is refused
            transaction.set_autocommit(False)
        return Errand.objects.filter(done=False)

    options = OPTIONS["at least once"]
    with caplog.at_level(logging.WARNING, logger="dcl_processor"):
        report = batch_processor(pending=pending, done={"done": True}, **options)(
            lambda row: None
        )()
    assert_run(report, processed=3)
    assert Errand.objects.using("other").filter(done=True).count() == 3
    assert "left open" in caplog.text


def test_a_handlers_own_blocks_cost_nothing() -> None:
    the.errands(3)

    def handle(row: Errand) -> None:
        with transaction.atomic():
            Errand.objects.filter(pk=row.pk).update(result="worked")

    options = OPTIONS["at least once"]
    report = batch_processor(
        pending=Errand.objects.filter(done=False), done={"done": True}, **options
    )(handle)()
    assert_run(report, processed=3)
    assert Errand.objects.filter(done=True, result="worked").count() == 3


@pytest.mark.django_db(transaction=False)
@pytest.mark.parametrize("options", [OPTIONS["at most once"], OPTIONS["at least once"]])
def test_the_transaction_of_a_test_case_is_nobodys_leftover(options: dict[str, Any]) -> None:
    the.errands(3)
    report = batch_processor(
        pending=Errand.objects.filter(done=False), done={"done": True}, **options
    )(lambda row: None)()
    assert_run(report, processed=3)
    assert connection.in_atomic_block
    assert Errand.objects.filter(done=True).count() == 3
