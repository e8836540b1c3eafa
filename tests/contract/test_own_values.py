"""Flips with another value for each row of a batch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from threading import Event
from typing import Any

import pytest
from django.db import connection, transaction
from django.db.models import F

from dcl_processor import BatchProcessor, Delivery, Lease, batch_processor
from tests.contract.support import errands as the
from tests.contract.support.deadlocks import wait_until_a_session_waits
from tests.contract.support.gate import HAS_ROW_LOCKS
from tests.contract.support.reports import assert_run
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


Make = Callable[..., BatchProcessor[Any]]


def transactional(pending: Any, results: Any, **options: Any) -> BatchProcessor[Any]:
    """Make a processor whose rows get the results in their order, as the values of their flips."""

    def handle(rows: Any) -> list[Any]:
        return [results.get(row.pk, {"done": True}) for row in rows]

    options = {"done": lambda row, result: result, "batch_size": 100, **options}
    return batch_processor(pending=pending, **{"process_batch": handle, **options})(the.ignore)


def at_least_once(pending: Any, results: Any, **options: Any) -> BatchProcessor[Any]:
    options = {"delivery": Delivery.AT_LEAST_ONCE, "lease": Lease(60), **options}
    return transactional(pending, results, **options)


both = pytest.mark.parametrize("make", [transactional, at_least_once])


def results() -> list[str]:
    return list(Errand.objects.order_by("place").values_list("result", flat=True))


#: What is refused: also a text that is too long, which must not be cut; SQLite takes any length.
REFUSED: list[dict[str, Any]] = [{"code": "taken"}]
if connection.vendor != "sqlite":
    REFUSED.append({"result": "x" * 51})


@both
@pytest.mark.parametrize("refused", REFUSED)
def test_a_value_that_the_database_refuses_fails_its_row_alone(
    make: Make, refused: dict[str, Any]
) -> None:
    rows = the.errands(6)
    Errand.objects.create(place=99, done=True, code="taken")
    given: dict[Any, Any] = {
        row.pk: {"done": True, "result": f"sent {row.place}", "code": str(row.place)}
        for row in rows
    }
    given[rows[3].pk] |= refused
    report = the.proven(make(the.PENDING, given))()
    assert_run(report, processed=5, failed=1)
    assert [each.pk for each in report.failures] == [rows[3].pk]
    assert [the.state(row)["done"] for row in rows] == [place != 3 for place in range(6)]


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
            if given[0].place >= 0:
                block.enter_context(the.meanwhile(change))
                the.wait(changed)
            return [f"sent {row.place}" for row in given]

        def done(row: Errand, result: str) -> dict[str, Any]:
            return {"done": True, "result": result}

        run = the.at_least_once(the.ignore, process_batch=handle, done=done, batch_size=9)
        with ExitStack() as block:
            report = the.proven(run)()
        assert_run(report, processed=4 - is_lost, lease_lost=int(is_lost))
        expected = [f"sent {place}" for place in range(4)]
        if is_lost:
            expected[1] = ""
        assert results() == expected
        assert [the.state(row)["leased_until"] for row in rows] == [False, is_lost, False, False]
        assert Errand.objects.get(pk=rows[1].pk).last_error == "noted meanwhile"
