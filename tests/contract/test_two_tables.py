"""A row in two tables (multi-table inheritance) is settled, put back and requeued as one row.

Django writes to such a row by a SELECT and an UPDATE for each table. Between any two of these
another worker may take the row over, or the process may be killed.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Event
from typing import Any

import pytest
from django.db import connection, transaction
from django.db.models import Q

from dcl_processor import BatchProcessor, Delivery, Lease, Report, Retry, batch_processor
from tests.contract.support import errands as the
from tests.contract.support.gate import HAS_ROW_LOCKS
from tests.contract.support.reports import assert_run
from tests.contract.support.sessions import before_statement
from tests.models import Express, Freight

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

COLUMNS = ("done", "dead", "claimed", "result", "claimed_at", "leased_until", "attempts")


class Lapsed(Lease):
    """A lease that every other worker takes for lapsed."""

    def free(self) -> Q:
        return Q(pk__isnull=False)


LEASED: dict[str, Any] = {
    "delivery": Delivery.AT_LEAST_ONCE,
    "lease": Lapsed(60),
    "retry": Retry(max_attempts=9, backoff=0, jitter=0),
}
CLAIMED: dict[str, Any] = {
    "delivery": Delivery.AT_MOST_ONCE,
    "claim": {"claimed": True},
    "claimed_at": "claimed_at",
    "reset": {"claimed": False},
}
KINDS = {"lease": LEASED, "claim": CLAIMED}
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def processor(handler: Callable[..., Any], kind: Any, **options: Any) -> BatchProcessor[Express]:
    options = {
        "pending": Express.objects.filter(done=False, dead=False, claimed=False),
        "done": {"done": True, "claimed": False, "result": "settled"},
        **kind,
        **options,
    }
    return batch_processor(**options)(handler)


def rows(number: int, **values: Any) -> list[Express]:
    return [Express.objects.create(**values) for _ in range(number)]


def state(row: Express, using: str = "other") -> dict[str, Any]:
    said: dict[str, Any] = Express.objects.using(using).values(*COLUMNS).get(pk=row.pk)
    return said


def untouched(row: Express) -> bool:
    return state(row) == {name: getattr(Express(), name) for name in COLUMNS}


def is_write(sql: str) -> bool:
    return sql.startswith("UPDATE") and "1 = 0" not in sql


def is_locked(row: Express) -> bool:
    """Tell whether both parts of the row are locked by another session."""
    free = [
        model.objects.using("other").filter(pk=row.pk).select_for_update(skip_locked=True)
        for model in (Freight, Express)
    ]
    return not any(the.elsewhere(lambda rows=rows: _locked_rows(rows)) for rows in free)  # type: ignore[misc]  # a default


def _locked_rows(rows: Any) -> list[Any]:
    with transaction.atomic(using="other"):
        return list(rows.values_list("pk", flat=True))


if HAS_ROW_LOCKS:

    @pytest.mark.parametrize("at", [0, 1], ids=["first row", "later row"])
    def test_a_worker_that_comes_during_a_settlement_does_not_take_the_row(at: int) -> None:
        """The lease has lapsed by then; the settlement has looked, and not written yet."""
        made = rows(2)
        handled: list[Any] = []
        reports: list[Report] = []
        second = processor(lambda row: handled.append("second"), LEASED)

        def come() -> None:
            row = Q(pk=made[at].pk)
            reports.append(the.elsewhere(lambda: second(filter=row, wait_for_locked=0)))

        first = processor(lambda row: handled.append(row.pk), LEASED)

        def is_this_one(sql: str) -> bool:
            return is_write(sql) and len(handled) == at + 1

        with before_statement(is_this_one, come):
            reports.append(first(filter=Q(pk__in=[row.pk for row in made])))
        assert handled == [row.pk for row in made]
        during, after = reports
        assert_run(during, skipped=1)
        assert_run(after, processed=2)
        assert [state(row)["leased_until"] for row in made] == [None, None]

    def test_a_worker_that_comes_during_a_joint_settlement_does_not_take_a_row() -> None:
        made = rows(3)
        handled: list[Any] = []
        reports: list[Report] = []
        second = processor(lambda row: handled.append("second"), LEASED)

        async def handle(row: Express) -> None:
            handled.append(row.pk)

        def come() -> None:
            reports.append(the.elsewhere(lambda: second(wait_for_locked=0)))

        first = processor(handle, LEASED, batch_size=3)
        with before_statement(lambda sql: is_write(sql) and len(handled) == 3, come):
            reports.append(first(concurrency=3))
        # Rows that the settlement did not write yet may be taken; each is settled by one worker.
        assert sum(each.processed for each in reports) == 3
        assert len(handled) == 3 + sum(each.lease_lost for each in reports)
        assert [state(row)["done"] for row in made] == [True] * 3

    @each_kind
    def test_both_parts_are_locked_when_the_first_is_written(kind: Any) -> None:
        [row] = rows(1)
        locked: list[bool] = []
        handled: list[Any] = []
        run = processor(lambda row: handled.append(row.pk), kind)
        with before_statement(
            lambda sql: is_write(sql) and bool(handled), lambda: locked.append(is_locked(row))
        ):
            assert_run(run(), processed=1)
        assert locked == [True]

    def test_both_parts_are_locked_when_a_person_settles_or_requeues_it() -> None:
        one, two = rows(2, claimed=True, claimed_at="2024-05-01T00:00:00Z", attempts=3)
        run = processor(the.ignore, CLAIMED, retry=Retry())
        locked: list[bool] = []
        for row, act in ((one, run.mark_done), (two, run.requeue)):
            chosen = Express.objects.filter(pk=row.pk)
            with before_statement(
                lambda sql: sql.startswith("UPDATE"),
                lambda row=row: locked.append(is_locked(row)),  # type: ignore[misc]  # a default
            ):
                assert act(chosen) == 1
        assert locked == [True, True]
        assert (state(one)["done"], state(one)["claimed_at"]) == (True, None)
        assert untouched(two)


class Killed(BaseException):
    """Stands for a process that is killed: no error handler catches it, nothing more is sent."""


def die_at(number: int, where: Callable[[str], bool]) -> Any:
    """Let the process die before this one of the statements that ``where`` recognises."""
    seen: list[str] = []

    def wrapper(execute: Callable[..., Any], sql: str, *args: Any) -> Any:
        if where(sql):
            seen.append(sql)
        if len(seen) >= number:
            raise Killed
        return execute(sql, *args)

    return connection.execute_wrapper(wrapper)


@each_kind
@pytest.mark.parametrize("number", [1, 2])
def test_a_process_that_dies_in_a_settlement_has_written_all_of_it_or_nothing(
    kind: Any, number: int
) -> None:
    [row] = rows(1)
    claimed: dict[str, Any] = {}
    run = processor(the.ignore, kind)

    def handle(row: Express) -> None:
        claimed.update(state(row))
        death.__enter__()

    death = die_at(number, is_write)
    try:
        with pytest.raises(Killed):
            processor(handle, kind)()
    finally:
        death.__exit__(None, None, None)
        connection.close()  # what becomes of the session of a killed process
    assert state(row) == claimed
    if kind is CLAIMED:
        assert list(run.in_doubt(older_than=0)) == [row]
        assert run.mark_done(run.in_doubt(older_than=0)) == 1
    else:
        assert_run(run(), processed=1)
    assert state(row)["done"]


@pytest.mark.parametrize("act", ["mark_done", "requeue"])
@pytest.mark.parametrize("number", [1, 2])
def test_a_person_who_is_cut_off_has_written_all_of_it_or_nothing(act: str, number: int) -> None:
    made = rows(2, claimed=True, claimed_at="2024-05-01T00:00:00Z")
    before = [state(row) for row in made]
    run = processor(the.ignore, CLAIMED)
    with pytest.raises(Killed), die_at(number, is_write):
        getattr(run, act)(Express.objects.all())
    connection.close()
    assert [state(row) for row in made] == before


@each_kind
def test_rows_that_are_not_started_are_put_back_in_both_tables(kind: Any) -> None:
    made = rows(5)
    stop = Event()
    report = processor(lambda row: stop.set(), kind, batch_size=3)(stop=stop)
    assert_run(report, processed=1, stopped="signal")
    assert all(untouched(row) for row in made[1:])


def test_what_a_person_asks_for_is_asked_again_under_the_lock() -> None:
    """The rows that were meant have changed since they were read: they are left alone."""
    one, two = rows(2, dead=True, attempts=3)
    run = processor(the.ignore, CLAIMED, reset={"dead": False})

    def change() -> None:
        def work() -> None:
            Freight.objects.filter(pk=one.pk).update(dead=False, result="changed")

        the.elsewhere(work)

    begins = " FOR " if HAS_ROW_LOCKS else "1 = 0"
    with before_statement(lambda sql: begins in sql, change):
        assert run.requeue(Express.objects.filter(dead=True)) == 1
    assert (state(one)["result"], state(one)["attempts"]) == ("changed", 3)
    assert not state(two)["dead"]
