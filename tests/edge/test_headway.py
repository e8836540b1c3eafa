"""How far a run is: its figures, the estimates they begin with, and who sees them."""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connection, connections
from django.db.models import Q, QuerySet
from django.test.utils import CaptureQueriesContext
from pytest_django import DjangoAssertNumQueries

from dcl_processor import BatchProcessor, batch_processor
from dcl_processor.diagnosis import Trouble
from dcl_processor.execution.calls import Call
from dcl_processor.insights.answer import Answer, How
from dcl_processor.insights.status import Size, size
from dcl_processor.management import headway as headway_module
from dcl_processor.management.headway import Headway, corrected, lines
from dcl_processor.management.watching import _Log
from dcl_processor.processes.graceful_stop import Stop
from dcl_processor.processes.health import Health
from dcl_processor.processes.news import AtWork, Died
from dcl_processor.values import about
from tests.edge.manage import execute, output, shown_on_a_terminal
from tests.edge.watchers import parcels
from tests.models import Depot
from tests.waiting import wait

pytestmark = pytest.mark.django_db(transaction=True)

MANY = Answer(10_000, How.MORE_THAN)


class Clock:
    """Shows the time that a test sets."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


def headway(found: Size, clock: Clock | None = None, limit: int | None = None) -> Headway:
    return Headway("shop.send", found, limit=limit, clock=clock or Clock())


def go_on(way: Headway, clock: Clock, rows: int, seconds: float) -> None:
    """Handle so many rows, evenly over the seconds."""
    for _ in range(rows):
        clock.now += seconds / rows
        way.count("processed")


def opener(**options: Any) -> BatchProcessor[Depot]:
    @batch_processor(
        pending=lambda: Depot.objects.filter(open=True), done={"open": False}, **options
    )
    def close(depot: Depot) -> None: ...

    return close


# --- the figures


def test_a_counted_backlog_has_a_percentage_a_rate_and_a_time() -> None:
    clock = Clock()
    way = headway(Size(Answer(2_700)), clock)
    assert way.line() == "shop.send: 0 of 2,700 (0 %)"
    go_on(way, clock, 299, 30)
    way.count("failed")
    assert way.line() == "shop.send: 300 of 2,700 (11 %), 1 failed, 10 rows/s, about 4 min left"
    assert way.as_dict() == {
        "name": "shop.send",
        "done": 300,
        "failed": 1,
        "total": {"value": 2_700, "how": "exact"},
        "percent": 11,
        "rows_per_second": 10.0,
        "seconds_left": 240,
    }


def test_an_estimate_is_marked_as_one() -> None:
    clock = Clock()
    way = headway(Size(MANY, 1_203_456, "monday"), clock)
    go_on(way, clock, 12_000, 10)
    assert way.line() == "shop.send: 12,000 of ~1,203,000 (0 %), 1,200 rows/s, about 17 min left"
    assert way.as_dict()["total"] == {"value": 1_203_456, "how": "estimated"}


def test_without_an_estimate_there_is_no_percentage() -> None:
    """As on SQLite."""
    clock = Clock()
    way = headway(Size(MANY), clock)
    go_on(way, clock, 100, 10)
    assert way.line() == "shop.send: 100 of more than 10,000, 10 rows/s"
    go_on(way, clock, 10_000, 10)
    assert way.position() == "10,100 rows"
    assert (way.fraction, way.seconds_left, way.is_estimated) == (None, None, False)


def test_a_size_that_could_not_be_found_out_is_left_out() -> None:
    way = headway(Size(Answer[int].unknown("not within 1 s")))
    way.count("processed")
    assert way.line() == "shop.send: 1 rows"
    assert way.as_dict()["total"] == {"value": None, "how": "unknown", "why": "not asked yet"}


@pytest.mark.parametrize(
    ("limit", "shown"),
    [(500, "0 of 500 (0 %)"), (20_000, "0 of ~20,000 (0 %)"), (90_000, "0 of ~50,000 (0 %)")],
)
def test_a_limit_is_exact_as_far_as_rows_were_counted(limit: int, shown: str) -> None:
    assert headway(Size(MANY, 50_000, "monday"), limit=limit).position() == shown


def test_the_rate_is_that_of_the_last_minute() -> None:
    clock = Clock()
    way = headway(Size(Answer(100_000)), clock)
    go_on(way, clock, 6_000, 600)  # 10 rows/s
    go_on(way, clock, 6_000, 60)  # 100 rows/s
    rate = way.rate
    assert rate is not None
    assert 95 < rate < 101
    assert way.left() == "about 15 min left"
    clock.now += 600  # a row that takes ten minutes
    rate = way.rate
    assert rate is not None
    assert 0 < rate < 2


def test_rows_that_take_minutes_have_a_rate() -> None:
    clock = Clock()
    way = headway(Size(Answer(50)), clock)
    go_on(way, clock, 20, 20 * 120)
    clock.now += 60
    assert way.line() == "shop.send: 20 of 50 (40 %), 0.47 rows/min, about 63 min left"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "about 1 s"),
        (40, "about 40 s"),
        (89, "about 89 s"),
        (700, "about 12 min"),
        (10_000, "about 3 h"),
        (200_000, "about 2 d"),
    ],
)
def test_a_remaining_time_is_written_in_one_unit(seconds: float, text: str) -> None:
    assert about(seconds) == text


# --- corrections


@pytest.mark.parametrize(
    ("known", "day", "total"), [(400_000, "tuesday", 420_000), (101_000, "monday", 100_000)]
)
def test_new_statistics_correct_the_total_and_old_ones_do_not(
    known: int, day: str, total: int
) -> None:
    """These still expect the rows that were handled since."""
    way = headway(Size(MANY, 100_000, "monday"))
    for _ in range(20_000):
        way.count("processed")
    way.learn(Size(MANY, known, day))
    assert way.total == Answer(total, How.ESTIMATED)


def test_a_count_at_the_end_makes_the_total_exact() -> None:
    way = headway(Size(MANY, 100_000, "monday"))
    for _ in range(20_000):
        way.count("processed")
    assert way.is_estimated
    way.learn(Size(Answer(5_000)))
    assert way.position() == "20,000 of 25,000 (80 %)"
    assert not way.is_estimated


def test_rows_that_stay_pending_are_not_counted_twice() -> None:
    way = headway(Size(MANY, 100_000, "monday"))
    for outcome in ("processed", "discarded", "failed", "snoozed"):
        way.count(outcome)
    way.learn(Size(Answer(10)))
    assert way.total == Answer(12)  # the failed row and the snoozed one are among the 10


def test_an_estimate_below_what_was_counted_is_none() -> None:
    way = headway(Size(MANY, 12, "monday"))
    assert way.position() == "0 of more than 10,000"
    assert way.is_estimated  # and may become better
    way.learn(Size(MANY, 50_000, "tuesday"))
    assert way.position() == "0 of ~50,000 (0 %)"


def test_a_question_that_fails_leaves_the_figures_as_they_are() -> None:
    way = headway(Size(MANY, 50_000, "monday"))
    way.learn(Size(Answer[int].unknown("not within 1 s")))
    assert way.total == Answer(50_000, How.ESTIMATED)
    assert way.is_estimated


def test_an_exact_total_is_never_less_than_what_is_done() -> None:
    way = headway(Size(Answer(2)))
    for _ in range(3):
        way.count("processed")
    assert way.position() == "3 of 3 (100 %)"


@contextmanager
def each_moment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(headway_module, "CORRECTED_EACH", 0.001)
    yield
    assert "dcl_processor.following" not in {each.name for each in threading.enumerate()}


def test_a_thread_corrects_on_a_connection_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    Depot.objects.bulk_create(Depot(open=True) for _ in range(5))
    way, asked, used = headway(Size(MANY, 50_000, "monday")), threading.Event(), set[Any]()

    def ask() -> Size:
        found = size(opener())
        used.add(connection.connection)
        asked.set()
        return found

    with each_moment(monkeypatch), corrected(way, ask):
        wait(asked)
    assert way.total == Answer(5)
    assert len(used) == 1
    assert connection.connection not in used
    assert all(each.closed for each in used)


def test_a_counted_backlog_is_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask() -> Size:
        raise AssertionError("it was asked")

    before = threading.active_count()
    with each_moment(monkeypatch), corrected(headway(Size(Answer(9))), ask):
        assert threading.active_count() == before
    with each_moment(monkeypatch), corrected(headway(Size(MANY)), ask):
        assert threading.active_count() == before  # no estimate, as on SQLite


# --- the planner's estimate


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_it_is_asked_where_the_run_reads() -> None:
    """On the alias of the run, and with its filter."""
    Depot.objects.using("other").bulk_create(Depot(open=True) for _ in range(20))
    first = Depot.objects.using("other").values_list("pk", flat=True)[0]
    with connections["other"].cursor() as cursor:
        cursor.execute("ANALYZE tests_depot")
    processor = opener(using="other")
    with (
        CaptureQueriesContext(connection) as here,
        CaptureQueriesContext(connections["other"]) as there,
    ):
        found = size(processor, most=5)
        few = size(processor, filter=Q(pk=first), most=5)
    assert found.counted == Answer(5, How.MORE_THAN)
    assert few == Size(Answer(1))
    assert len(here) == 0
    assert sum(query["sql"].startswith("EXPLAIN") for query in there) == 1


def test_an_error_is_left_to_the_run() -> None:
    def pending() -> QuerySet[Depot]:
        raise ZeroDivisionError

    @batch_processor(pending=pending, done={"open": False})
    def divide(depot: Depot) -> None: ...

    found = size(divide)
    assert found.counted.how is How.UNKNOWN
    assert "ZeroDivisionError" in found.counted.why


# --- what a person sees


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_without_a_spectator_nothing_is_asked(
    installed: None, django_assert_num_queries: DjangoAssertNumQueries
) -> None:
    out, err = Terminal(), Terminal()
    with django_assert_num_queries(1):
        call_command("processors", "run", "warehouse.deliver", verbosity=0, stdout=out, stderr=err)
    with django_assert_num_queries(1):  # stderr is a file
        call_command("processors", "run", "warehouse.deliver", stdout=out, stderr=StringIO())
    assert err.getvalue() == ""


def on_a_terminal(
    *arguments: str, lines_each: float = 10.0, rich: bool = True, sample: float = 1.0
) -> str:
    """Run the command on a terminal, with a count that stops at 3; return what it shows."""
    program = "" if rich else "import sys; sys.modules['rich'] = None\n"
    program += (
        "from django.core.management import execute_from_command_line\n"
        "from dcl_processor import backlog\n"
        "from dcl_processor.management import headway\n"
        f"backlog.MOST, headway.LINE_EACH, headway.SAMPLE = 3, {lines_each}, {sample}\n"
        f"execute_from_command_line(['manage.py', 'processors', *{list(arguments)!r}])"
    )
    code, shown = shown_on_a_terminal([sys.executable, "-c", program], NO_COLOR="1")
    assert code == 0, shown
    return shown


def analyzed_parcels(number: int) -> None:
    parcels(*[""] * number)
    execute("ANALYZE tests_parcel")


def test_without_rich_there_are_lines() -> None:
    analyzed_parcels(8)
    # Without a rate, which the machine decides.
    how: dict[str, Any] = {"lines_each": 0, "rich": False, "sample": 600}
    shown = on_a_terminal("run", "warehouse.deliver", **how).splitlines()
    assert shown[:2] == ["warehouse.deliver: 1 of ~8 (12 %)", "warehouse.deliver: 2 of ~8 (25 %)"]
    assert shown[7] == "warehouse.deliver: 8 rows"  # an estimate is reached before the run ends
    assert len(shown) == 9


def test_with_json_the_lines_have_the_value_and_the_method() -> None:
    analyzed_parcels(8)
    shown = on_a_terminal("run", "warehouse.deliver", "--json", lines_each=0, rich=False)
    first, *_, last = map(json.loads, shown.splitlines())
    assert first["total"] == {"value": 8, "how": "estimated"}
    assert (first["done"], first["percent"]) == (1, 12)
    assert last["processed"] == 8


@pytest.mark.parametrize(("seconds", "written"), [(9.0, 0), (10.0, 1), (25.0, 2)])
def test_a_line_is_written_now_and_then(seconds: float, written: int) -> None:
    clock, got = Clock(), list[str]()
    way = headway(Size(Answer(100)), clock)

    def write(way: Headway) -> None:
        got.append(way.line())

    with lines(way, write=write, clock=clock) as on_row:
        for _ in range(50):
            clock.now += seconds / 50
            on_row("processed")
    assert len(got) == written
    assert way.done == 50


# --- the fields of the records that a watch logs


@pytest.mark.parametrize(
    ("names", "name", "expected"),
    [
        (["shop.a"], "shop.a", {"processor": "shop.a", "worker": 2}),
        (["shop.a"], None, {"processor": "shop.a", "worker": 2}),
        (["shop.a", "shop.b"], None, {"worker": 2}),
    ],
)
def test_a_worker_that_died_is_named_in_its_record(
    names: list[str], name: str | None, expected: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    written, _, _ = output()
    with caplog.at_level(logging.INFO, "dcl_processor"):
        log = _Log(written, names, Health(names, Stop()))
        log.tell(2, name, Died(Trouble("killed by SIGKILL"), None))
    [record] = caplog.records
    known = {each: vars(record)[each] for each in ("processor", "worker") if each in vars(record)}
    assert known == expected
    assert "killed by SIGKILL" in record.getMessage()


def test_the_line_about_a_dead_worker_has_its_row_and_what_it_leaves() -> None:
    """Nothing else mentions a charge that was cut off, until a person asks."""
    written, _, err = output()
    call = AtWork.of(Call("shop.charge", (17,), None))
    log = _Log(written, ["shop.charge"], Health(["shop.charge"], Stop()), "; rows are in doubt")
    log.tell(2, None, Died(Trouble("killed by SIGKILL"), None, call))
    said = "shop.charge, worker 2: killed by SIGKILL, last seen at row 17 since "
    assert err.getvalue().startswith(said)
    assert err.getvalue().endswith(" of shop.charge; rows are in doubt\n")
