"""Tables of an unusual kind: in another schema, and with rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connection, models
from django.test.utils import isolate_apps

from dcl_processor import BatchProcessor, Delivery, Lease, batch_processor
from dcl_processor.columns import LeaseColumn, RetryColumns
from tests.contract.support.reports import assert_run
from tests.contract.support.sessions import part_locked

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


@pytest.fixture
def parcels_elsewhere() -> Iterator[type[models.Model]]:
    """Make a table in a schema of its own."""
    with isolate_apps("tests"):

        class Parcel(RetryColumns, LeaseColumn):
            sent = models.BooleanField(default=False)
            dead = models.BooleanField(default=False)
            claimed = models.BooleanField(default=False)
            claimed_at = models.DateTimeField(null=True)

            class Meta:
                app_label = "tests"
                db_table = 'second"."parcel'

        with connection.cursor() as cursor:
            cursor.execute("CREATE SCHEMA second")
        try:
            with connection.schema_editor() as editor:
                editor.create_model(Parcel)
            yield Parcel
        finally:
            with connection.cursor() as cursor:
                cursor.execute("DROP SCHEMA second CASCADE")


DELIVERIES: dict[str, dict[str, Any]] = {
    "transactional": {"delivery": Delivery.TRANSACTIONAL},
    "in batches": {"delivery": Delivery.TRANSACTIONAL, "batch_size": 4},
    "at most once": {"delivery": Delivery.AT_MOST_ONCE},
    "with a claim": {
        "delivery": Delivery.AT_MOST_ONCE,
        "claim": {"claimed": True},
        "claimed_at": "claimed_at",
    },
    "at least once": {"delivery": Delivery.AT_LEAST_ONCE, "lease": Lease(60)},
    "in batches at least once": {
        "delivery": Delivery.AT_LEAST_ONCE,
        "lease": Lease(60),
        "batch_size": 4,
    },
}


def processor(
    model: Any, calls: list[int], pending: models.Q, **options: Any
) -> BatchProcessor[Any]:
    @batch_processor(
        pending=model.objects.filter(pending), done={"sent": True}, failed={"dead": True}, **options
    )
    def handle(row: Any) -> None:
        calls.append(row.pk)

    return handle


OWN = models.Q(sent=False, claimed=False, dead=False)


@pytest.mark.parametrize("spans", [False, True], ids=["own-table", "spanning"])
@pytest.mark.parametrize("options", DELIVERIES.values(), ids=[*DELIVERIES])
def test_every_delivery_handles_each_row_once(
    parcels_elsewhere: Any, options: dict[str, Any], spans: bool
) -> None:
    model = parcels_elsewhere
    for _ in range(10):
        model.objects.create()
    pks = sorted(model.objects.values_list("pk", flat=True))
    calls: list[int] = []
    pending = OWN & models.Q(pk__in=model.objects.filter(OWN).values("pk")) if spans else OWN
    run = processor(model, calls, pending, **options)
    with part_locked(model, pks[4]):
        report = run(wait_for_locked=0)
    assert_run(report, processed=9, skipped=1)
    assert_run(run(), processed=1)
    assert sorted(calls) == pks
    assert model.objects.filter(sent=True, leased_until=None, claimed_at=None).count() == 10
