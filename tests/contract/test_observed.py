"""Code of others that is called between two rows, or for each statement, while something waits."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connection, transaction

from tests.contract.support import errands as the
from tests.contract.support.messages import SENDS_SEVERAL, updates
from tests.contract.support.reports import assert_run
from tests.contract.support.temporary import temporary
from tests.contract.test_settle_later import at_update, places
from tests.models import Errand
from tests.waiting import Barrier

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(not SENDS_SEVERAL, reason="the driver sends one statement at a time"),
]

deliveries = pytest.mark.parametrize(
    "make", [the.transactional, the.at_most_once, the.at_least_once]
)
SPANNING = the.PENDING.filter(pk__in=the.PENDING.values("pk"))


def with_context(execute: Callable[..., Any], sql: str, params: Any, *rest: Any) -> Any:
    """Send a setting with each write, as libraries do that record who has changed a row.

    It expects one statement, whose result it leaves the cursor at.
    """
    if sql.startswith(("UPDATE", "WITH")):
        sql = f"SELECT set_config('tests.context', %s, true); {sql}"
        params = ("user 7", *(params or ()))
    cursor = execute(sql, params, *rest)
    while cursor is not None and cursor.nextset():
        pass
    return cursor


@pytest.fixture
def _observed() -> Iterator[None]:
    with connection.execute_wrapper(with_context):
        yield


observed = pytest.mark.usefixtures("_observed")


@observed
@deliveries
@pytest.mark.parametrize("value", ["100%", "%s", "a%%b"])
def test_values_are_written_as_they_are(make: the.Make, value: str) -> None:
    the.errands(5)
    assert_run(make(the.ignore, done={"done": True, "result": value})(), processed=5)
    assert set(Errand.objects.values_list("result", flat=True)) == {value}


@observed
@deliveries
def test_a_spanning_question_is_asked(make: the.Make) -> None:
    the.errands(5)
    assert_run(make(the.ignore, pending=SPANNING)(), processed=5)


@observed
@the.each_delivery
def test_each_row_has_the_answer_of_its_own_settlement(make: the.Make) -> None:
    rows = the.errands(5)

    def meddle(row: Errand) -> None:
        mine = Errand.objects.filter(pk=row.pk)
        if row.place == 1:
            the.elsewhere(lambda: Errand.objects.filter(pk=rows[2].pk).update(done=True))
        if row.place == 3:
            the.elsewhere(lambda: mine.update(leased_until=None, claimed_at=None))

    assert_run(make(meddle)(), processed=3, lease_lost=1, stale=1)
    assert places(done=True) == [0, 1, 2, 4]


@deliveries
def test_a_wrapper_that_raises_before_a_claim_fails_the_next_row(make: the.Make) -> None:
    """The row before has been handled, and is done."""
    the.errands(4)
    handled: list[int] = []

    def refuse(execute: Callable[..., Any], sql: str, *rest: Any) -> Any:
        if handled == [0, 1] and "FOR NO KEY UPDATE" in sql and not updates(sql):
            raise RuntimeError("no more statements")
        return execute(sql, *rest)

    with connection.execute_wrapper(refuse):
        report = make(lambda row: handled.append(row.place))()
    assert places(done=True)[:2] == [0, 1]
    assert {failure.pk for failure in report.failures}.isdisjoint(
        Errand.objects.filter(done=True).values_list("pk", flat=True)
    )


class ToDatabase(logging.Handler):
    """Writes each logged error to the database; ``rolls_back``: and rolls that write back."""

    def __init__(self, *, rolls_back: bool) -> None:
        super().__init__(logging.ERROR)
        self._rolls_back = rolls_back
        self.errors: list[Exception] = []

    def emit(self, record: logging.LogRecord) -> None:
        try:
            with transaction.atomic():
                Errand.objects.create(done=True, claimed=True, place=-1)
                transaction.set_rollback(self._rolls_back)
        except Exception as error:  # noqa: BLE001  # looked at by the test
            self.errors.append(error)


@deliveries
@pytest.mark.parametrize("rolls_back", [False, True], ids=["commits", "rolls back"])
def test_a_log_handler_may_use_the_database(make: the.Make, rolls_back: bool) -> None:
    """A failure is logged when nothing waits."""
    the.errands(5)
    handler, logger = ToDatabase(rolls_back=rolls_back), logging.getLogger("dcl_processor")
    logger.addHandler(handler)
    try:
        with at_update("tests_refuse", "NEW.place = 2 AND NEW.done", "RAISE EXCEPTION 'refused'"):
            assert_run(make(the.ignore)(), processed=4, failed=1)
    finally:
        logger.removeHandler(handler)
    assert handler.errors == []
    assert places(place__gte=0, done=True) == [0, 1, 3, 4]
    assert places(place=-1) == [] if rolls_back else [-1]


@deliveries
def test_a_failure_that_ends_the_run_is_known_before_the_next_handler(make: the.Make) -> None:
    the.errands(6)
    handled: list[int] = []
    with at_update("tests_refuse", "NEW.place = 2 AND NEW.done", "RAISE EXCEPTION 'refused'"):
        run = make(lambda row: handled.append(row.place), max_consecutive_failures=1)
        assert_run(run(), processed=2, failed=1, stopped="failures")
    assert handled == [0, 1, 2]


@deliveries
def test_a_thread_starts_no_row_after_an_interrupt(make: the.Make) -> None:
    """Not even one of a batch that was dispatched in advance."""
    the.errands(40)
    handled: list[tuple[int, int]] = []
    both = Barrier(2)

    def handle(row: Errand) -> None:
        handled.append((threading.get_ident(), row.place))
        if row.place in (10, 11):
            both.wait()  # while more rows wait for a thread
        if row.place == 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(handle)(concurrency=2)
    [interrupted] = [thread for thread, place in handled if place == 10]
    assert [place for thread, place in handled if thread == interrupted][-1] == 10


@the.each_delivery
def test_a_value_that_is_computed_is_computed_once(make: the.Make) -> None:
    """Also if its message fails, and if it cannot be sent."""
    the.errands(4)
    calls: list[int] = []

    def result() -> str:
        calls.append(1)
        return f"{len(calls)}"

    claims = "NEW.place = 2 AND (NEW.claimed OR NEW.leased_until IS NOT NULL) AND NOT NEW.done"
    with (
        temporary("CREATE SEQUENCE tests_once", "DROP SEQUENCE tests_once"),
        at_update("tests_refuse", f"{claims} AND nextval('tests_once') = 1", "RAISE EXCEPTION 'x'"),
    ):
        assert_run(make(the.ignore, done={"done": True, "result": result})(), processed=4)
    rehearsed = len(calls) - 4
    assert rehearsed == 1
    assert len(set(Errand.objects.values_list("result", flat=True))) == 4


@deliveries
def test_a_value_that_cannot_be_sent_fails_its_own_row(make: the.Make) -> None:
    rows = the.errands(4)

    def done(row: Errand) -> dict[str, Any]:
        return {"done": True, "result": "\0" if row.place == 2 else "fine"}

    report = make(the.ignore, done=done)()
    assert report.processed == 3
    assert [failure.pk for failure in report.failures] == [rows[2].pk]
    assert places(done=True) == [0, 1, 3]
