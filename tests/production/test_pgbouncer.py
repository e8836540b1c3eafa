"""What works through PgBouncer, in both of its modes that can be used, and what does not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from django.db import OperationalError, connections

from dcl_processor import BatchProcessor, Delivery, Lease, batch_processor
from tests.contract.support import errands as the
from tests.contract.support.errands import elsewhere
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


def processors() -> Iterator[BatchProcessor[Errand]]:
    pending = Errand.objects.filter(done=False)
    done: dict[str, Any] = {"pending": pending, "done": {"done": True, "claimed": False}}
    yield batch_processor(**done)(lambda row: None)
    yield batch_processor(**done, batch_size=10)(lambda row: None)
    yield batch_processor(
        **{**done, "pending": pending.filter(claimed=False)},
        claim={"claimed": True},
        delivery=Delivery.AT_MOST_ONCE,
    )(lambda row: None)
    yield batch_processor(**done, lease=Lease(60), delivery=Delivery.AT_LEAST_ONCE)(
        lambda row: None
    )


def test_every_delivery_runs_through_it(pooled: str) -> None:
    for processor in processors():
        Errand.objects.bulk_create(Errand() for _ in range(20))
        report = processor.run(using=pooled)
        assert_run(report, processed=20)
        assert not Errand.objects.filter(done=False).exists()
        Errand.objects.all().delete()


def test_max_in_flight_counts_rows_through_it_and_direct_ones(pooled: str) -> None:
    Errand.objects.bulk_create(Errand() for _ in range(3))
    pending = Errand.objects.filter(done=False)
    options: dict[str, Any] = {"pending": pending, "done": {"done": True}, "max_in_flight": 1}
    others: list[Any] = []

    def handle(row: Errand) -> None:
        for using in (pooled, "default"):
            run = partial(over(the.ignore).run, using=using, wait_for_locked=0)
            others.append(elsewhere(run))

    over = batch_processor(
        name="shop.capped", delivery=Delivery.AT_LEAST_ONCE, lease=Lease(60), **options
    )
    assert_run(over(handle).run(using=pooled, limit=1), processed=1, stopped="limit")
    assert [report.stopped for report in others] == ["busy", "busy"]
    assert_run(over(the.ignore).run(using="default"), processed=2)


def test_the_options_of_a_connection_are_refused(pooled: str) -> None:
    """Therefore keepalives are set for the role, and in PgBouncer's own configuration."""
    options = {"options": "-c tcp_keepalives_idle=30"}
    refused = pytest.raises(OperationalError, match="unsupported startup parameter: options")
    with other(OPTIONS=options), refused:
        connections[pooled].ensure_connection()


@contextmanager
def pooled_and_cut(mode: str, *, forwarded: bool, before: bool) -> Iterator[None]:
    """Lose the first COMMIT: ``before`` PgBouncer has it, or between PgBouncer and the server."""
    direct = connections["default"].settings_dict
    if before:
        with (
            pgbouncer(direct, mode=mode) as settings,
            other(HOST=settings["HOST"], PORT=settings["PORT"]),
            cut(b"COMMIT", forwarded=forwarded),
        ):
            yield
        return
    with (
        cut(b"COMMIT", forwarded=forwarded),
        pgbouncer(connections["other"].settings_dict, mode=mode) as settings,
        other(HOST=settings["HOST"], PORT=settings["PORT"]),
    ):
        yield


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("before", [True, False], ids=["before-it", "behind-it"])
@pytest.mark.parametrize("forwarded", [True, False], ids=["answer-lost", "request-lost"])
def test_what_became_of_a_lost_commit_is_looked_up_through_it(
    mode: str, before: bool, forwarded: bool
) -> None:
    alone, batch, *_ = processors()  # the claims of the others are one statement, without COMMIT
    for processor in (alone, batch):
        Errand.objects.bulk_create(Errand() for _ in range(3))
        with pooled_and_cut(mode, forwarded=forwarded, before=before):
            report = processor.run(using="other")
        lost = 0 if forwarded else 1
        left = Errand.objects.filter(done=False).count()
        if processor.batch_size == 1:
            assert_run(report, processed=3 - lost, failed=lost)
            assert left == lost
        else:
            # A batch that was rolled back is redone row by row.
            assert_run(report, processed=3)
            assert left == 0
        Errand.objects.all().delete()
