"""Asynchronous handlers that end together: one statement settles them, each as its own."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from threading import Event
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import OperationalError, connection
from django.db.models import F
from django.test.utils import CaptureQueriesContext

from tests.contract.support import errands as the
from tests.contract.support.reports import assert_run
from tests.models import Errand

pytestmark = [
    pytest.mark.django_db(transaction=True, databases=["default", "other"]),
    pytest.mark.usefixtures("nothing_is_left"),
]


class Together:
    """Keeps the run's thread busy with the first row while the handlers of all others end."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.ended = 0
        self.loop: asyncio.AbstractEventLoop | None = None
        self.may_end = asyncio.Event()
        self.all_ended = Event()

    async def end(self, row: Errand) -> str:
        if row.place < 0:
            return ""
        if row.place == 0:
            self.loop = asyncio.get_running_loop()
            return "first"
        async with asyncio.timeout(the.PATIENCE):
            await self.may_end.wait()
        self.ended += 1
        if self.ended == self.number - 1:
            self.last = asyncio.create_task(self.tell())
        return "together"

    async def tell(self) -> None:
        # As the run looks at the connection first, if a handler has used one: outcomes come after.
        await sync_to_async(id)(self)
        self.all_ended.set()

    def done(self, row: Errand, result: str) -> dict[str, Any]:
        if result == "first":
            self.let_the_others_end()
        return {"done": True, "result": result}

    def let_the_others_end(self) -> None:
        assert self.loop is not None
        # Not before: one that had ended by now would be settled beside the first.
        self.loop.call_soon_threadsafe(self.may_end.set)
        the.wait(self.all_ended)


def run(make: the.Make, handle: Any = None, **options: Any) -> tuple[Any, list[str]]:
    """Run over the rows that there are; return the report and the flips that were sent."""
    number = Errand.objects.count()
    together = Together(number)

    async def handler(row: Errand) -> str:
        if handle is not None:
            await handle(row)
        return await together.end(row)

    processor = the.proven(make(handler, **{"done": together.done, **options}))
    with CaptureQueriesContext(connection) as context:
        report = processor(concurrency=number)
    sent = [each["sql"] for each in context.captured_queries]
    flips = [each for each in sent if "UPDATE" in each and "together" in each]
    return report, flips


@the.each_delivery
def test_handlers_that_end_together_are_settled_by_one_update(make: the.Make) -> None:
    rows = the.errands(11)
    report, flips = run(make)
    assert_run(report, processed=11)
    assert len(flips) == 1, flips
    said = [the.state(row) for row in rows]
    assert [each["result"] for each in said] == ["first"] + ["together"] * 10
    assert all(each["done"] for each in said)
    assert not any(each["leased_until"] or each["claimed_at"] for each in said)


def run_plainly(make: the.Make, handle: Any = None) -> Any:
    """Run with a ``done`` that is the same for all rows; return the report."""
    together = Together(Errand.objects.count())

    async def handler(row: Errand) -> None:
        if handle is not None:
            await handle(row)
        await together.end(row)

    def settle(execute: Any, sql: str, *args: Any) -> Any:
        # The first statement after the first handler has ended settles its row.
        if together.loop is not None and not together.all_ended.is_set():
            together.let_the_others_end()
        return execute(sql, *args)

    processor = the.proven(make(handler))
    with connection.execute_wrapper(settle):
        return processor(concurrency=together.number)


def test_a_lost_lease_is_not_taken_for_settled_where_the_flip_is_plain() -> None:
    """Nothing but the number of rows written tells: the flip is not asked about afterwards."""
    rows = the.errands(5)

    async def lose(row: Errand) -> None:
        if row.place == 2:
            later = F("leased_until") + timedelta(hours=1)
            await Errand.objects.filter(pk=row.pk).aupdate(leased_until=later, result="not mine")

    report = run_plainly(the.at_least_once, lose)
    assert_run(report, processed=4, lease_lost=1)
    said = [the.state(row) for row in rows]
    assert [each["done"] for each in said] == [True, True, False, True, True]
    assert (said[2]["result"], said[2]["leased_until"]) == ("not mine", True)


@the.each_delivery
def test_rows_whose_common_commit_was_not_answered_are_not_taken_for_lost(
    make: the.Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was committed; the session ends before its answer comes."""
    rows = the.errands(5)
    lost: list[bool] = []
    driven: Any = connection
    commit = driven._commit

    def lose() -> None:
        if Errand.objects.using("other").filter(done=True).count() == 5 and not lost:
            lost.append(True)
            driven.connection.close()
            raise OperationalError("the server closed the connection")

    def commit_and_lose() -> None:
        commit()
        lose()

    def send_and_lose(execute: Any, *args: Any) -> Any:
        answer = execute(*args)
        lose()
        return answer

    monkeypatch.setattr(driven, "_commit", commit_and_lose)
    with connection.execute_wrapper(send_and_lose):
        report = run_plainly(make)
    assert lost
    assert_run(report, processed=5)
    said = [the.state(row) for row in rows]
    assert all(each["done"] for each in said)
    assert not any(each["leased_until"] or each["claimed_at"] for each in said)


def test_a_row_that_stays_pending_fails_alone() -> None:
    rows = the.errands(5)
    stays = Errand.objects.filter(claimed=False, dead=False).exclude(done=True, attempts=0)

    async def handle(row: Errand) -> None:
        if row.place == 3:
            await Errand.objects.filter(pk=row.pk).aupdate(attempts=1)

    report, _ = run(the.at_least_once, handle, pending=stays)
    assert_run(report, processed=4, failed=1)
    assert [failure.pk for failure in report.failures] == [rows[3].pk]
    assert [the.state(row)["done"] for row in rows] == [True, True, True, False, True]
