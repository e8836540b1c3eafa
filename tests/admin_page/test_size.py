"""What the pages and the command show of a table with a million pending rows, and how soon."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from django.db import connection

from dcl_processor.admin_page import panels
from dcl_processor.database.connection import is_connected
from dcl_processor.insights import answer
from dcl_processor.insights.answer import Answer, How
from dcl_processor.insights.row import show
from dcl_processor.insights.status import NUMBERS, status
from dcl_processor.management import showing
from tests.contract.support import errands as the
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True)


#: Seconds of a line, and how many times as long as a plain count of all rows one may take where
#: that is more, because the machine has other things to do.
LINE, TIMES = 1.0, 12


@pytest.fixture
def million(db: None) -> None:
    """Make a million pending errands: one in ten is due later, and one in a hundred has failed."""
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO tests_errand (attempts, next_attempt_at, last_error, place, done, dead, "
            "claimed, result) SELECT (n %% 100 = 0)::int, "
            "CASE WHEN n %% 10 = 0 THEN now() + interval '1 hour' END, "
            "CASE WHEN n %% 100 = 0 THEN 'OSError: no route' ELSE '' END, n, false, false, false, "
            "'' FROM generate_series(1, 1000000) n",
            [],
        )
        cursor.execute("ANALYZE tests_errand")


def _seconds(ask: Callable[[], Any]) -> tuple[float, Any]:
    began = time.monotonic()
    answer = ask()
    return time.monotonic() - began, answer


@pytest.mark.usefixtures("million")
def test_each_line_of_a_million_rows_comes_in_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """No index serves any of these questions, so that this is the worst case."""
    processor = the.at_least_once(
        the.ignore,
        name="shop.many",
        claim={"claimed": True},
        claimed_at="claimed_at",
        reset={"claimed": False},
        failed={"dead": True},
        retry=the.retry(),
        pending_since="next_attempt_at",
    )
    first, last = Errand.objects.order_by("pk")[0], Errand.objects.order_by("-pk")[0]
    plain, number = _seconds(lambda: Errand.objects.filter(done=False, place__gt=0).count())
    assert number == 1_000_000

    def line(name: str, **options: Any) -> Answer[Any]:
        return status(processor, only=[name], **options).answers[name]

    asked: dict[str, Callable[[], Any]] = {
        f"status {name}": partial(line, name) for name in NUMBERS
    }
    asked |= {f"list {name}": partial(line, name, most=0) for name in showing.STATES}
    asked |= {f"show {row.pk}": partial(show, processor, row.pk) for row in (first, last)}
    asked["panel"] = lambda: panels.panel(
        "p0", processor, (), now=time.time(), end=math.inf, down={}
    )
    found = {name: _seconds(ask) for name, ask in asked.items()}
    begun: list[float] = []

    def noted(using: str) -> bool:
        begun.append(time.monotonic())
        return is_connected(using)

    monkeypatch.setattr(answer, "is_connected", noted)
    details = panels.details(processor, math.inf, {})
    ends = [*begun[1:], time.monotonic()]
    # In the order in which they are asked.
    names = ("locked", "failures", "in_doubt", "given_up")
    for name, began, end in zip(names, begun, ends, strict=True):
        found[f"details {name}"] = (end - began, getattr(details, name))

    most = max(LINE, TIMES * plain)
    assert {name: took for name, (took, _) in found.items() if took > most} == {}
    answers = {name: each for name, (_, each) in found.items() if isinstance(each, Answer)}
    assert answers["status pending"] == Answer(10_000, How.MORE_THAN)
    unknown = {name: each.why for name, each in answers.items() if each.how is How.UNKNOWN}
    assert not unknown
