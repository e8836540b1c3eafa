"""Workers of one command: a row that failed in one of them is not tried by the others."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connection

from dcl_processor import Snooze
from dcl_processor.execution import failed_elsewhere
from dcl_processor.execution.failed_elsewhere import FailedElsewhere
from tests.contract.support import errands as the
from tests.contract.support.other_worker import OtherWorker, beside, other_process
from tests.contract.support.reports import assert_run
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

NAME = "shop.shared"
MAKES = [the.transactional, the.at_most_once, the.at_least_once]
each_delivery = pytest.mark.parametrize("make", MAKES)


@pytest.fixture(scope="module")
def process() -> Iterator[subprocess.Popen[str]]:
    with other_process() as process:
        yield process


@pytest.fixture
def other(process: subprocess.Popen[str]) -> Iterator[OtherWorker]:
    with beside(process, NAME) as other:
        yield other


@each_delivery
def test_a_row_that_failed_in_another_worker_is_not_claimed(
    make: the.Make, other: OtherWorker
) -> None:
    rows = the.errands(5)
    calls: list[int] = []
    other.failed(rows[2].pk)
    report = make(lambda row: calls.append(row.place), name=NAME)()
    assert_run(report, processed=4)
    assert calls == [0, 1, 3, 4]
    assert the.untouched(rows[2])


@pytest.mark.parametrize("size", [1, 2])
@each_delivery
def test_a_row_that_failed_after_the_candidates_were_read_is_given_back_at_its_claim(
    make: the.Make, size: int, other: OtherWorker
) -> None:
    """Its lock was free, so the claim gets it; only the look after the claim finds it."""
    rows = the.errands(5)
    calls: list[int] = []

    def handle(row: Errand) -> None:
        calls.append(row.place)
        if row.place == 0:
            other.failed(rows[3].pk)

    report = make(handle, name=NAME, batch_size=size)()
    assert_run(report, processed=4)
    assert calls == [0, 1, 2, 4]
    assert the.untouched(rows[3])


@each_delivery
def test_a_claim_of_such_rows_alone_calls_no_handler(make: the.Make, other: OtherWorker) -> None:
    rows = the.errands(3)

    def handle(row: Errand) -> None:
        for each in rows[1:]:
            other.failed(each.pk)

    assert_run(make(handle, name=NAME)(), processed=1)
    assert the.untouched(rows[1])
    assert the.untouched(rows[2])


def test_asynchronous_handlers_leave_such_rows_alone(other: OtherWorker) -> None:
    rows = the.errands(5)
    other.failed(rows[1].pk)

    async def handle(row: Errand) -> None:
        """Succeed."""

    assert_run(the.at_least_once(handle, name=NAME)(concurrency=2), processed=4)
    assert the.untouched(rows[1])


def fail(row: Errand) -> None:
    raise ValueError(row.place)


def snooze(row: Errand) -> None:
    raise Snooze


@pytest.mark.parametrize("handle", [fail, snooze])
@each_delivery
def test_a_row_is_added_before_other_workers_can_claim_it(
    make: the.Make, handle: Callable[[Errand], None], other: OtherWorker
) -> None:
    """At the statement that is its last one, it is locked or marked, and added already."""
    the.errands(1)
    added: list[int] = []

    def observe(execute: Callable[..., Any], sql: str, *args: Any) -> Any:
        with other.file() as file:
            if sql.lstrip().startswith("UPDATE") and "next_attempt_at" in sql:
                added.append(file.added)
        return execute(sql, *args)

    run = make(handle, name=NAME, retry=the.retry(), reset={"claimed": False})
    with connection.execute_wrapper(observe):
        run()
    assert added[-1] == 1


def test_a_row_that_succeeds_is_not_added(other: OtherWorker) -> None:
    the.errands(5)
    assert_run(the.transactional(the.ignore, name=NAME)(), processed=5)
    with other.file() as file:
        assert file.added == 0


def test_a_worker_redoes_the_rows_of_its_own_batch(other: OtherWorker) -> None:
    """One of them ended the transaction after another one had failed."""
    the.errands(3)
    calls: list[int] = []

    def handle(row: Errand) -> None:
        calls.append(row.place)
        if row.place == 0 and len(calls) == 1:
            raise ValueError
        if row.place == 2 and len(calls) == 3:
            connection.connection.rollback()

    the.transactional(handle, name=NAME, batch_size=3)()
    assert calls[:5] == [0, 1, 2, 0, 1]
    assert [row.place for row in Errand.objects.filter(done=True).order_by("place")][:2] == [0, 1]
    with other.file() as file:
        assert file.added >= 1


def test_another_processor_shares_nothing(other: OtherWorker) -> None:
    rows = the.errands(2)
    other.failed(rows[0].pk)
    assert_run(the.transactional(the.ignore, name="shop.alone")(), processed=2)
    alone = the.errands(1)[-1]
    other.failed(alone.pk)
    other_label = OtherWorker(other.process, other.path, "shop.alone")
    other_label.failed(alone.pk)
    assert failed_elsewhere.of_run("shop.alone", "default") is None


def test_a_new_run_of_a_watch_tries_the_row_again(process: subprocess.Popen[str]) -> None:
    with beside(process, NAME, is_one_run=False) as other:
        rows = the.errands(3)
        other.failed(rows[1].pk)

        def handle(row: Errand) -> None:
            if row.place == 0:
                other.failed(rows[2].pk)

        run = the.transactional(handle, name=NAME)
        assert_run(run(), processed=2)
        assert the.untouched(rows[2])
        assert_run(run(), processed=1)


def test_i8_the_oldest_rows_are_forgotten(
    other: OtherWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failed_elsewhere, "MOST", 5)  # of this process's part
    with other.file() as file:
        mine = FailedElsewhere(file, NAME, "default", is_one_run=True)
        for pk in range(3):
            other.failed(pk)
        assert mine.among(range(10)) == [0, 1, 2]
        for pk in range(3, 5):
            other.failed(pk)
        assert mine.among(range(10)) == [0, 1, 2, 3, 4]
        assert len(mine._known) == 5
        late = FailedElsewhere(file, NAME, "default", is_one_run=True)
        assert late.among([7]) == []
        assert len(late._known) == 5
        mine.add(9)
        assert mine.among([9]) == []
