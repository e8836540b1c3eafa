"""What works through PgBouncer, in both of its modes that can be used, and what does not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest
from django.db import connections

from dcl_processor import BatchProcessor
from tests.contract.support import errands as the
from tests.contract.support.reports import assert_run
from tests.crash.proxy import cut
from tests.databases import other
from tests.models import Errand
from tests.servers.pgbouncer import is_installed, pgbouncer

pytestmark = [
    pytest.mark.django_db(transaction=True, databases=["default", "other"]),
    pytest.mark.skipif(not is_installed(), reason="pgbouncer is not installed"),
]

MODES = ["session", "transaction"]


@pytest.fixture(params=MODES)
def pooled(request: pytest.FixtureRequest) -> Iterator[str]:
    """Give the alias of a database that is reached through PgBouncer."""
    direct = connections["default"].settings_dict
    with (
        pgbouncer(direct, mode=request.param, default_pool_size=2) as settings,
        other(HOST=settings["HOST"], PORT=settings["PORT"]),
    ):
        yield "other"


def test_every_delivery_runs_through_it(pooled: str) -> None:
    for make in (the.transactional, the.at_most_once, the.at_least_once):
        for size in (1, 10):
            the.errands(20)
            assert_run(make(the.ignore, batch_size=size)(using=pooled), processed=20)
            assert not Errand.objects.filter(done=False).exists()
            Errand.objects.all().delete()


def test_max_in_flight_counts_rows_through_it_and_direct_ones(pooled: str) -> None:
    the.errands(3)
    others: list[Any] = []

    def capped(handler: Any) -> BatchProcessor[Errand]:
        return the.at_least_once(handler, name="shop.capped", max_in_flight=1)

    def handle(row: Errand) -> None:
        for using in (pooled, "default"):
            run = partial(capped(the.ignore).run, using=using, wait_for_locked=0)
            others.append(the.elsewhere(run))

    assert_run(capped(handle).run(using=pooled, limit=1), processed=1, stopped="limit")
    assert [report.stopped for report in others] == ["busy", "busy"]
    assert_run(capped(the.ignore).run(using="default"), processed=2)


@contextmanager
def pooled_and_cut(mode: str, *, forwarded: bool, before: bool) -> Iterator[None]:
    """Lose the first COMMIT: ``before`` PgBouncer has it, or between PgBouncer and the server."""
    with ExitStack() as stack:
        if not before:
            stack.enter_context(cut(b"COMMIT", forwarded=forwarded))
        direct = connections["other"].settings_dict
        settings = stack.enter_context(pgbouncer(direct, mode=mode))
        stack.enter_context(other(HOST=settings["HOST"], PORT=settings["PORT"]))
        if before:
            stack.enter_context(cut(b"COMMIT", forwarded=forwarded))
        yield


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("before", [True, False], ids=["before-it", "behind-it"])
@pytest.mark.parametrize("forwarded", [True, False], ids=["answer-lost", "request-lost"])
def test_what_became_of_a_lost_commit_is_looked_up_through_it(
    mode: str, before: bool, forwarded: bool
) -> None:
    """A batch that was rolled back is redone row by row."""
    for size, lost in ((1, int(not forwarded)), (10, 0)):
        the.errands(3)
        with pooled_and_cut(mode, forwarded=forwarded, before=before):
            report = the.transactional(the.ignore, batch_size=size)(using="other")
        assert_run(report, processed=3 - lost, failed=lost)
        assert Errand.objects.filter(done=False).count() == lost
        Errand.objects.all().delete()
