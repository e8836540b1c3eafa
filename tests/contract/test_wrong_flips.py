"""Flips that cannot be written, found after two handlers at most; and rows that all fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from django.db import connection
from django.db.models import F

from dcl_processor import Report
from dcl_processor.exceptions import InvalidDone, ProcessorError, StillPending
from tests.contract.support import errands as the
from tests.contract.support.reports import assert_run
from tests.contract.support.temporary import temporary
from tests.models import Errand

#: Failures that end a run in which nothing succeeds.
MOST_FROM_THE_START = 50

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


def raises(*_: object) -> dict[str, Any]:
    raise KeyError("charge")


WRONG: dict[str, Callable[..., Any]] = {
    "nothing": lambda *_: None,
    "no mapping": lambda *_: "done",
    "unknown column": lambda *_: {"dnoe": True},
    "primary key": lambda *_: {"pk": 3},
    "unknown expression": lambda *_: {"place": F("palce") + 1, "done": True},
    "wrong value": lambda *_: {"place": "three", "done": True},
    "raises": raises,
}
each_wrong = pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)


def of_result(wrong: Callable[..., Any]) -> Callable[[Errand, Any], Any]:
    return lambda row, result: wrong(row, result)  # noqa: PLW0108  # for its signature


def of_row(wrong: Callable[..., Any]) -> Callable[[Errand], Any]:
    return lambda row: wrong(row)  # noqa: PLW0108  # likewise


def refused(report: Report) -> bool:
    return (
        (report.processed, report.failed, report.stopped) == (0, 2, "failures")
        and all(isinstance(each.error, InvalidDone) for each in report.failures)
        and all("expected done to" in str(each.error) for each in report.failures)
    )


@the.all_deliveries
@each_wrong
@pytest.mark.parametrize("of", [of_row, of_result])
@pytest.mark.parametrize("size", [1, 30])
def test_a_wrong_flip_ends_the_run_at_its_second_row(
    make: Any, wrong: Any, of: Any, size: int
) -> None:
    the.errands(30)
    calls: list[int] = []
    process = make(lambda row: calls.append(row.place), done=of(wrong), batch_size=size)
    for concurrency in (1, 1 if make is the.transactional else 4):
        calls.clear()
        assert refused(process(concurrency=concurrency))
        # A TRANSACTIONAL row's error may be found at the end of its batch, which is redone.
        assert len(calls) == len(set(calls)) == 2


@the.all_deliveries
def test_a_flip_of_the_row_alone_that_leaves_it_pending_calls_no_handler(make: Any) -> None:
    rows = the.errands(30)
    options = {"claim": {"result": "claimed"}} if make is the.at_most_once else {}
    pending = Errand.objects.filter(done=False, result="")
    process = make(
        the.raising(AssertionError("expected no call")),
        pending=pending,
        done=lambda row: {"place": row.place, "result": ""},
        **options,
    )
    for _ in range(2):
        with pytest.raises(StillPending, match="its handler was not called"):
            process()
    assert all(the.untouched(row) for row in rows)


@the.all_deliveries
@pytest.mark.parametrize("size", [1, 7, 200])
def test_a_run_in_which_nothing_succeeds_ends_after_some_failures(make: Any, size: int) -> None:
    the.errands(120)
    calls: list[int] = []

    def handle(row: Errand) -> None:
        calls.append(row.place)
        raise OSError("no answer")

    report = make(handle, batch_size=size)()
    assert_run(report, failed=MOST_FROM_THE_START, stopped="failures")
    assert len(calls) == len(set(calls)) == MOST_FROM_THE_START


# --- a trigger that keeps what a claim or a flip was to overwrite, in some rows


CREATE = {
    "postgresql": (
        """CREATE FUNCTION tests_keep() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        IF OLD.place % 3 = 2 THEN NEW.{0} = OLD.{0}; END IF; RETURN NEW; END $$""",
        """CREATE TRIGGER tests_keep BEFORE UPDATE ON tests_errand FOR EACH ROW
        EXECUTE FUNCTION tests_keep()""",
    ),
    "mysql": (
        """CREATE TRIGGER tests_keep BEFORE UPDATE ON tests_errand FOR EACH ROW
        SET NEW.{0} = IF(OLD.place % 3 = 2, OLD.{0}, NEW.{0})""",
    ),
    "sqlite": (
        """CREATE TRIGGER tests_keep AFTER UPDATE ON tests_errand FOR EACH ROW
        WHEN OLD.place % 3 = 2 BEGIN
        UPDATE tests_errand SET {0} = OLD.{0} WHERE id = OLD.id; END""",
    ),
}
DROP = {
    "postgresql": ("DROP TRIGGER tests_keep ON tests_errand", "DROP FUNCTION tests_keep"),
    "mysql": ("DROP TRIGGER tests_keep",),
    "sqlite": ("DROP TRIGGER tests_keep",),
}


@pytest.fixture
def kept(request: pytest.FixtureRequest) -> Iterator[str]:
    """Keep the old value of a column in every third row."""
    column: str = request.param
    create, drop = CREATE[connection.vendor], DROP[connection.vendor]
    with temporary("; ".join(create).format(column), "; ".join(drop)):
        yield column


NO_CLAIM: dict[str, Any] = {"claim": None, "claimed_at": None}
CASES: list[Any] = [
    pytest.param("done", the.at_most_once, NO_CLAIM, id="flip"),
    pytest.param("claimed", the.at_most_once, {}, id="claim"),
    pytest.param("leased_until", the.at_least_once, {}, id="lease"),
]
#: Of a claim that was requeued, and of a lease that lapsed.
EARLIER = {
    "claimed_at": datetime(2026, 1, 1, tzinfo=UTC),
    "leased_until": datetime(2026, 1, 1, tzinfo=UTC),
}


@pytest.mark.parametrize("before", [{}, EARLIER], ids=["at first", "again"])
@pytest.mark.parametrize("size", [1, 6])
@pytest.mark.parametrize(("kept", "make", "options"), CASES, indirect=["kept"])
def test_a_row_whose_mark_is_not_kept_is_not_handled(
    kept: str, make: Any, options: Any, size: int, before: dict[str, Any]
) -> None:
    rows = the.errands(9, **before)
    handled: list[int] = []
    run = make(lambda row: handled.append(row.place), batch_size=size, **options)
    report = run()
    assert_run(report, processed=6, failed=3)
    assert all(isinstance(each.error, ProcessorError) for each in report.failures)
    assert all(repr(kept) in str(each.error) for each in report.failures)
    # No other row is left for the next run to try its claim on.
    again = run()
    assert_run(again, failed=again.failed, stopped=again.stopped)
    assert again.failed
    assert sorted(handled) == [0, 1, 3, 4, 6, 7]
    refused = Errand.objects.filter(place__in=[2, 5, 8])
    assert refused.filter(done=False, result="", attempts=0).count() == 3
    assert [the.state(row)["done"] for row in rows] == [True, True, False] * 3


AFTER = (
    """CREATE FUNCTION tests_keep() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF OLD.place % 3 = 2 THEN UPDATE tests_errand SET done = OLD.done WHERE id = OLD.id;
    END IF; RETURN NULL; END $$""",
    """CREATE TRIGGER tests_keep AFTER UPDATE ON tests_errand FOR EACH ROW
    WHEN (pg_trigger_depth() = 0) EXECUTE FUNCTION tests_keep()""",
)
FLIPS: list[Any] = [
    pytest.param(the.transactional, {}, id="transactional"),
    pytest.param(the.at_most_once, {"done": {"done": True, "claimed": False}}, id="at most once"),
    pytest.param(the.at_most_once, {}, id="at most once, still marked"),
    pytest.param(the.at_least_once, {}, id="at least once"),
]


@pytest.fixture
def put_back(request: pytest.FixtureRequest, kept: str) -> None:
    """Put the flip back in every third row, before or after the row is written."""
    if request.param == "AFTER":
        with connection.cursor() as cursor:
            for statement in (*DROP["postgresql"], *AFTER):
                cursor.execute(statement)


TIMES = ["BEFORE", "AFTER"] if connection.vendor == "postgresql" else ["BEFORE"]


@pytest.mark.parametrize("kept", ["done"], indirect=True)
@pytest.mark.parametrize("put_back", TIMES, indirect=True)
@pytest.mark.parametrize("size", [1, 6])
@pytest.mark.parametrize(("make", "options"), FLIPS)
def test_a_row_whose_flip_is_put_back_fails_by_name(
    kept: str, put_back: None, make: Any, options: Any, size: int
) -> None:
    rows = the.errands(9)
    bad = {rows[place].pk for place in (2, 5, 8)}
    run = make(the.ignore, batch_size=size, **options)
    # Two such rows in a row end a run; after the first it goes on from a random place.
    for _ in range(100):
        report = run()
        ended = {"stopped": report.stopped, "failed": len(report.failures)}
        assert_run(report, processed=report.processed, **ended)
        assert {each.pk for each in report.failures} <= bad
        assert all(isinstance(each.error, ProcessorError) for each in report.failures)
        if Errand.objects.filter(done=True).count() == 6:
            break
    assert [the.state(row)["done"] for row in rows] == [True, True, False] * 3
