"""The bar of a run on a terminal: how many rows it begins with, and its figures."""

from __future__ import annotations

import re
from io import StringIO
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connection
from django.db.models import Q, QuerySet
from django.test.utils import CaptureQueriesContext
from pytest_django import DjangoAssertNumQueries
from rich.progress import Progress, Task

from dcl_processor import BatchProcessor, batch_processor
from dcl_processor.insights import status
from dcl_processor.insights.answer import Answer, How
from dcl_processor.insights.status import waiting
from dcl_processor.management import progress
from tests.models import Depot

pytestmark = pytest.mark.django_db(transaction=True)

WHERE: dict[str, Any] = {"filter": None, "using": None, "limit": None}


def opener(**options: Any) -> BatchProcessor[Depot]:
    @batch_processor(
        pending=lambda: Depot.objects.filter(open=True), done={"open": False}, **options
    )
    def close(depot: Depot) -> None: ...

    return close


class Screen:
    """Stands for rich's screen, with a clock that a test sets, and keeps what was drawn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1_000.0
        self.drawing: Any = None
        screen = self

        class Silent(Progress):
            def __init__(self, *columns: Any, **options: Any) -> None:
                options |= {"auto_refresh": False, "get_time": lambda: screen.now}
                super().__init__(*columns, **options)
                screen.drawing = self

        monkeypatch.setattr(progress, "Progress", Silent)

    def text(self) -> str:
        (task,) = self.drawing.tasks
        return str(self.drawing.columns[-1].render(task))

    @property
    def task(self) -> Task:
        (task,) = self.drawing.tasks
        assert isinstance(task, Task)
        return task


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    return Screen(monkeypatch)


def shown(screen: Screen, pending: Answer[int], rows: int, seconds: float, failed: int = 0) -> str:
    """Handle so many rows, evenly over the seconds; return the figures then."""
    with progress.bar("shop.send", pending, stopping=lambda: False, color=False) as count:
        for number in range(rows):
            screen.now += seconds / rows
            count("failed" if number < failed else "processed")
        return screen.text()


def test_a_counted_backlog_has_a_percentage_a_rate_and_a_time(screen: Screen) -> None:
    said = shown(screen, Answer(2_700), 301, 30.1, failed=1)
    assert said == "301 of 2,700 (11 %), 1 failed, 10 rows/s, about 4 min left"


@pytest.mark.parametrize("pending", [Answer[int].unknown("not within 1 s"), Answer(3)])
def test_without_a_number_of_rows_there_is_no_percentage(
    screen: Screen, pending: Answer[int]
) -> None:
    """Also if there are more rows than that."""
    assert re.fullmatch("4 rows, 1 rows/s", shown(screen, pending, 4, 4))


def test_rows_that_take_minutes_have_a_rate(screen: Screen) -> None:
    said = shown(screen, Answer(50), 20, 20 * 40)
    assert said == "20 of 50 (40 %), 1.5 rows/min, about 20 min left"


# --- how many rows wait


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_they_are_counted_where_the_run_reads() -> None:
    """On the alias of the run, with its filter, and up to its limit."""
    Depot.objects.using("other").bulk_create(Depot(open=True) for _ in range(20))
    first = Depot.objects.using("other").values_list("pk", flat=True)[0]
    processor = opener(using="other")
    with CaptureQueriesContext(connection) as here:
        assert waiting(processor, **WHERE) == Answer(20)
        assert waiting(processor, **{**WHERE, "filter": Q(pk=first)}) == Answer(1)
        assert waiting(processor, **{**WHERE, "limit": 5}) == Answer(5)
    assert len(here) == 0


def test_what_takes_too_long_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    Depot.objects.bulk_create(Depot(open=True) for _ in range(2_000))
    monkeypatch.setattr(status, "SIZE_TIMEOUT", 0.2)
    slow = batch_processor(
        pending=lambda: Depot.objects.extra(where=["pg_sleep(0.01) IS NOT NULL"]),
        done={"open": False},
    )(lambda depot: None)
    assert waiting(slow, **WHERE) == Answer.unknown("not within 0.2 s")


def test_an_error_is_left_to_the_run() -> None:
    def pending() -> QuerySet[Depot]:
        raise ZeroDivisionError

    divide = batch_processor(pending=pending, done={"open": False})(lambda depot: None)
    found = waiting(divide, **WHERE)
    assert found.how is How.UNKNOWN
    assert "ZeroDivisionError" in found.why


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
