"""``concurrency`` of plain handlers: threads with connections of their own, and one report."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Event
from typing import Any

import pytest

from dcl_processor.exceptions import Unsupported
from tests.contract.support import errands as the
from tests.contract.support.reports import assert_run
from tests.models import Errand
from tests.waiting import Barrier

pytestmark = [
    pytest.mark.django_db(transaction=True, databases=["default", "other"]),
    pytest.mark.usefixtures("nothing_is_left"),
]


def done() -> int:
    return Errand.objects.filter(done=True).count()


WORDS = r"expected concurrency=1 with TRANSACTIONAL, .* got 3; start more workers"


def test_handlers_in_the_transaction_of_their_lock_run_one_by_one() -> None:
    the.errands(2)
    with pytest.raises(Unsupported, match=WORDS):
        the.transactional(the.ignore, concurrency=3)
    run = the.transactional(the.ignore)
    with pytest.raises(Unsupported, match=WORDS):
        run(concurrency=3)
    assert done() == 0
    assert_run(run(concurrency=1), processed=2)


@pytest.mark.django_db(transaction=False)
@the.each_delivery
def test_plain_handlers_are_refused_threads_inside_a_test_case(make: Any) -> None:
    """It commits no rows, so that no other thread sees them."""
    the.errands(2)
    run = make(the.ignore, concurrency=3)
    with pytest.raises(Unsupported, match=r"expected concurrency=1 .* inside a TestCase, .* got 3"):
        run()
    assert Errand.objects.filter(done=False, claimed_at=None, leased_until=None).count() == 2
    assert_run(run(concurrency=1), processed=2)


@the.each_delivery
def test_the_limit_is_kept_by_all_of_them_together(make: Any) -> None:
    the.errands(12)
    calls: list[Any] = []
    report = make(lambda row: calls.append(row.pk)).run(concurrency=4, limit=5)
    assert_run(report, processed=5, stopped="limit")
    assert (len(calls), done()) == (5, 5)


def test_what_is_under_way_ends_when_a_handler_ends_the_run() -> None:
    the.errands(20)
    together, going, over = Barrier(3), Event(), Event()
    ended_by: list[int] = []

    def handle(row: Errand) -> None:
        if together.wait() == 0:
            ended_by.append(row.pk)
            going.set()
            raise KeyboardInterrupt
        the.wait(going)
        # A run that did not wait for these two would be over meanwhile.
        assert not over.wait(0.3)

    with pytest.raises(KeyboardInterrupt):
        # The limit: either of the others may be done before the run's thread hears of the end,
        # and would make room for a fourth.
        the.at_least_once(handle).run(concurrency=3, limit=3)
    over.set()
    assert (len(ended_by), done()) == (1, 2)
    assert not Errand.objects.filter(pk__in=ended_by, done=True).exists()
    # As if its process had been killed.
    assert [*Errand.objects.exclude(leased_until=None).values_list("pk", flat=True)] == ended_by


def test_each_thread_has_a_resource_of_its_own() -> None:
    the.errands(9)
    opened: list[int] = []
    closed: list[int] = []
    together = Barrier(3)

    @contextmanager
    def resource() -> Iterator[int]:
        opened.append(threading.get_ident())
        yield threading.get_ident()
        closed.append(threading.get_ident())

    def handle(row: Errand, mine: int) -> None:
        assert mine == threading.get_ident()
        together.wait()

    report = the.at_least_once(handle, resource=resource).run(concurrency=3)
    assert_run(report, processed=9)
    assert len(opened) == len(set(opened)) == 3
    assert sorted(closed) == sorted(opened)


def test_handlers_see_the_context_of_whoever_runs_them() -> None:
    the.errands(4)
    request: ContextVar[str] = ContextVar("request", default="none")
    request.set("7f3a")
    seen: list[str] = []
    the.at_least_once(lambda row: seen.append(request.get())).run(concurrency=2)
    assert seen == ["7f3a"] * 4


@the.each_delivery
def test_concurrency_as_an_option_is_the_default_of_a_run(make: Any) -> None:
    the.errands(6)
    together = Barrier(3)
    report = make(lambda row: together.wait(), concurrency=3)()
    assert_run(report, processed=6)
    assert done() == 6
