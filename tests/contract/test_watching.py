"""The watch is made of runs; ``wake()`` is a hint where the database can notify."""

from __future__ import annotations

import time

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from dcl_processor import Report, batch_processor
from dcl_processor.processes.graceful_stop import Stop
from dcl_processor.watch import notify
from dcl_processor.watch.watch import Plan, Watch
from tests.contract.support.reports import assert_run
from tests.models import Parcel

pytestmark = pytest.mark.django_db(transaction=True)


@batch_processor(pending=lambda: Parcel.objects.filter(sent=False), done={"sent": True})
def send(parcel: Parcel) -> None:
    """Have another parcel come in, as long as there is to be one."""
    if parcel.tries:
        Parcel.objects.create(tries=parcel.tries - 1)


def test_it_watches_until_its_rows_are_tried() -> None:
    Parcel.objects.create(tries=2)
    told: list[object] = []
    plan = Plan(interval=600, max_rows=3, deadline=time.monotonic() + 60)
    watch = Watch([send], plan, Stop(), lambda name, news: told.append(news))
    assert watch.run()
    reports = [each for each in told if isinstance(each, Report)]
    assert len(reports) == 3
    for report in reports:
        assert_run(report, processed=1)
    assert Parcel.objects.filter(sent=True).count() == 3


def test_wake_costs_a_statement_only_where_somebody_can_hear_it() -> None:
    notify._notified.clear()
    with CaptureQueriesContext(connection) as queries:
        send.wake()
    assert len(queries) == (1 if connection.vendor == "postgresql" else 0)
