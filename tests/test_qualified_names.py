"""A table in another schema, which Django's users name ``schema"."table``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connection, models
from django.test.utils import isolate_apps

from dcl_processor import BatchProcessor, Delivery, Lease, Retry, batch_processor
from dcl_processor.columns import LeaseColumn, RetryColumns
from dcl_processor.testing import hold_lock

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


@pytest.fixture
def parcels() -> Iterator[type[models.Model]]:
    """Make a table in a schema of its own, with ten rows, and a child of it."""
    with isolate_apps("tests"):

        class Parcel(RetryColumns, LeaseColumn):
            sent = models.BooleanField(default=False)
            dead = models.BooleanField(default=False)
            claimed = models.BooleanField(default=False)
            claimed_at = models.DateTimeField(null=True)

            class Meta:
                app_label = "tests"
                db_table = 'second"."parcel'

        class Fragile(Parcel):
            class Meta:
                app_label = "tests"
                db_table = 'second"."fragile'

        with connection.cursor() as cursor:
            cursor.execute("CREATE SCHEMA second")
        try:
            with connection.schema_editor() as editor:
                editor.create_model(Parcel)
                editor.create_model(Fragile)
            yield Fragile
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
@pytest.mark.parametrize("family", [False, True], ids=["one table", "parent and child"])
@pytest.mark.parametrize("options", DELIVERIES.values(), ids=[*DELIVERIES])
def test_every_delivery_handles_each_row_once(
    parcels: Any, options: dict[str, Any], spans: bool, family: bool
) -> None:
    model = parcels if family else parcels.__mro__[1]
    for _ in range(10):
        model.objects.create()
    pks = sorted(model.objects.values_list("pk", flat=True))
    calls: list[int] = []
    pending = OWN & models.Q(pk__in=model.objects.filter(OWN).values("pk")) if spans else OWN
    run = processor(model, calls, pending, **options)
    with hold_lock(model.objects.get(pk=pks[4])):
        report = run(wait_for_locked=0)
    assert (report.processed, report.failed, report.skipped) == (9, 0, 1), report.failures
    assert run().processed == 1
    assert sorted(calls) == pks
    assert model.objects.filter(sent=True, leased_until=None, claimed_at=None).count() == 10


def test_a_failure_is_noted(parcels: Any) -> None:
    parcel = parcels.__mro__[1]
    for _ in range(3):
        parcel.objects.create()

    @batch_processor(
        pending=parcel.objects.filter(OWN),
        done={"sent": True},
        failed={"dead": True},
        retry=Retry(1),
        delivery=Delivery.AT_LEAST_ONCE,
        lease=Lease(60),
    )
    def fail(row: Any) -> None:
        raise ValueError("no")

    assert fail().failed == 3
    assert parcel.objects.filter(dead=True, leased_until=None, attempts=1).count() == 3
