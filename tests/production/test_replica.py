"""What a replica takes off the primary."""

from __future__ import annotations

import pytest
from django.db import connections
from django.test.utils import CaptureQueriesContext

from dcl_processor import batch_processor
from tests.contract.support.reports import assert_run
from tests.models import Parcel

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


@pytest.mark.parametrize(("read_using", "counts"), [(None, (1, 0)), ("other", (0, 1))])
def test_i1_an_idle_run_asks_the_primary_nothing_when_a_replica_is_read(
    read_using: str | None, counts: tuple[int, int]
) -> None:
    look = batch_processor(
        pending=Parcel.objects.filter(sent=False), done={"sent": True}, read_using=read_using
    )(lambda row: None)
    look()  # connects
    with (
        CaptureQueriesContext(connections["default"]) as primary,
        CaptureQueriesContext(connections["other"]) as replica,
    ):
        look()
    assert (len(primary), len(replica)) == counts


def test_a_row_that_only_the_replica_shows_costs_one_claim_and_is_stale() -> None:
    (row,) = Parcel.objects.bulk_create([Parcel()])
    calls: list[int] = []

    look = batch_processor(
        pending=Parcel.objects.filter(sent=False), done={"sent": True}, read_using="other"
    )(lambda row: calls.append(row.pk))

    # The replica lags: between its answer and the claim the row is seen to be done.
    def finish(execute, sql, *args):  # type: ignore[no-untyped-def]
        answer = execute(sql, *args)
        Parcel.objects.using("default").filter(pk=row.pk).update(sent=True)
        return answer

    with connections["other"].execute_wrapper(finish):
        report = look()
    assert_run(report, stale=1)
    assert calls == []
