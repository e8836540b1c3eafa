"""``concurrency`` of plain handlers: threads with connections of their own, and one report."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Event
from typing import Any

import pytest

from dcl_processor.exceptions import Unsupported
from tests.contract.support.errands import (
    at_least_once,
    at_most_once,
    errands,
    ignore,
    our_threads,
    sessions,
    transactional,
    wait,
)
from tests.contract.support.heartbeat import until
from tests.contract.support.reports import assert_run
from tests.contract.support.sessions import end_session
from tests.models import Errand
from tests.waiting import Barrier

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

MAKERS: list[Any] = [at_most_once, at_least_once]


def done() -> int:
    return Errand.objects.filter(done=True).count()


WORDS = r"expected concurrency=1 with TRANSACTIONAL, .* got 3; start more workers"


def test_handlers_in_the_transaction_of_their_lock_run_one_by_one() -> None:
    errands(2)
    with pytest.raises(Unsupported, match=WORDS):
        transactional(ignore, concurrency=3)
    run = transactional(ignore)
    with pytest.raises(Unsupported, match=WORDS):
        run(concurrency=3)
    assert done() == 0
    assert_run(run(concurrency=1), processed=2)


@pytest.mark.django_db(transaction=False)
@pytest.mark.parametrize("make", MAKERS)
def test_plain_handlers_are_refused_threads_inside_a_test_case(make: Any) -> None:
    """It commits no rows, so that no other thread sees them."""
    errands(2)
    run = make(ignore, concurrency=3)
    with pytest.raises(Unsupported, match=r"expected concurrency=1 .* inside a TestCase, .* got 3"):
        run()
    assert Errand.objects.filter(done=False, claimed_at=None, leased_until=None).count() == 2
    assert_run(run(concurrency=1), processed=2)


@pytest.mark.django_db(transaction=False)
@pytest.mark.parametrize("make", MAKERS)
def test_async_handlers_run_one_by_one_inside_a_test_case(make: Any) -> None:
    errands(3)
    at_work: list[int] = []
    together: list[int] = []

    async def handle(row: Errand) -> None:
        at_work.append(row.pk)
        await asyncio.sleep(0)
        together.append(len(at_work))
        at_work.remove(row.pk)

    assert_run(make(handle, concurrency=3)(), processed=3)
    assert together == [1, 1, 1]


def test_a_session_that_ended_between_two_runs_is_replaced() -> None:
    """As it is in a run without threads."""
    errands(3)
    end_session()
    assert_run(at_least_once(ignore)(concurrency=2), processed=3)


@pytest.mark.parametrize("make", MAKERS)
def test_nothing_is_left_behind(make: Any) -> None:
    errands(9)
    before = sessions()
    make(lambda row: None).run(concurrency=3)
    assert our_threads() == []
    # The server takes a moment to end a session that was closed.
    until(lambda: sessions() <= before)


@pytest.mark.parametrize("make", MAKERS)
def test_the_limit_is_kept_by_all_of_them_together(make: Any) -> None:
    errands(12)
    calls: list[Any] = []
    report = make(lambda row: calls.append(row.pk)).run(concurrency=4, limit=5)
    assert_run(report, processed=5, stopped="limit")
    assert (len(calls), done()) == (5, 5)


def test_what_is_under_way_ends_when_a_handler_ends_the_run() -> None:
    errands(20)
    together, going, over = Barrier(3), Event(), Event()
    ended_by: list[int] = []

    def handle(row: Errand) -> None:
        if together.wait() == 0:
            ended_by.append(row.pk)
            going.set()
            raise KeyboardInterrupt
        wait(going)
        # A run that did not wait for these two would be over meanwhile.
        assert not over.wait(0.3)

    with pytest.raises(KeyboardInterrupt):
        # The limit: either of the others may be done before the run's thread hears of the end,
        # and would make room for a fourth.
        at_least_once(handle).run(concurrency=3, limit=3)
    over.set()
    assert (len(ended_by), done()) == (1, 2)
    assert not Errand.objects.filter(pk__in=ended_by, done=True).exists()
    # As if its process had been killed.
    assert [*Errand.objects.exclude(leased_until=None).values_list("pk", flat=True)] == ended_by
    assert our_threads() == []


class Opened:
    """Counts what is open, by thread."""

    def __init__(self) -> None:
        self.opened: list[int] = []
        self.closed: list[int] = []

    @contextmanager
    def __call__(self) -> Iterator[int]:
        self.opened.append(threading.get_ident())
        yield threading.get_ident()
        self.closed.append(threading.get_ident())


def test_each_thread_has_a_resource_of_its_own() -> None:
    errands(9)
    opened, together = Opened(), Barrier(3)

    def handle(row: Errand, mine: int) -> None:
        assert mine == threading.get_ident()
        together.wait()

    report = at_least_once(handle, resource=opened).run(concurrency=3)
    assert_run(report, processed=9)
    assert len(opened.opened) == len(set(opened.opened)) == 3
    assert sorted(opened.closed) == sorted(opened.opened)


def test_handlers_see_the_context_of_whoever_runs_them() -> None:
    errands(4)
    request: ContextVar[str] = ContextVar("request", default="none")
    request.set("7f3a")
    seen: list[str] = []
    at_least_once(lambda row: seen.append(request.get())).run(concurrency=2)
    assert seen == ["7f3a"] * 4


@pytest.mark.parametrize("make", MAKERS)
def test_concurrency_as_an_option_is_the_default_of_a_run(make: Any) -> None:
    errands(6)
    together = Barrier(3)
    report = make(lambda row: together.wait(), concurrency=3)()
    assert_run(report, processed=6)
    assert done() == 6
