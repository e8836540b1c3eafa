"""Tables of an unusual kind: in another schema, and with rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.db import NotSupportedError, connection, models, transaction
from django.test.utils import isolate_apps

from dcl_processor import BatchProcessor, Delivery, Lease, batch_processor
from dcl_processor.columns import LeaseColumn, RetryColumns
from dcl_processor.engine import marking
from dcl_processor.testing import hold_lock
from tests.contract.support import errands as the
from tests.contract.support.reports import assert_run
from tests.contract.support.temporary import temporary
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


@pytest.fixture
def parcels_elsewhere() -> Iterator[type[models.Model]]:
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
    parcels_elsewhere: Any, options: dict[str, Any], spans: bool, family: bool
) -> None:
    model = parcels_elsewhere if family else parcels_elsewhere.__mro__[1]
    for _ in range(10):
        model.objects.create()
    pks = sorted(model.objects.values_list("pk", flat=True))
    calls: list[int] = []
    pending = OWN & models.Q(pk__in=model.objects.filter(OWN).values("pk")) if spans else OWN
    run = processor(model, calls, pending, **options)
    with hold_lock(model.objects.get(pk=pks[4])):
        report = run(wait_for_locked=0)
    assert_run(report, processed=9, skipped=1)
    assert_run(run(), processed=1)
    assert sorted(calls) == pks
    assert model.objects.filter(sent=True, leased_until=None, claimed_at=None).count() == 10


@pytest.fixture
def ruled() -> Iterator[None]:
    """Note each change of a row elsewhere, by a rule, as PostgreSQL's users did before triggers."""
    make = """
        CREATE TABLE changes (id bigint);
        CREATE RULE note AS ON UPDATE TO tests_errand
            DO ALSO INSERT INTO changes VALUES (NEW.id)
    """
    with temporary(make, "DROP RULE note ON tests_errand; DROP TABLE changes"):
        yield
    marking.refused.clear()


@pytest.mark.parametrize("make", [the.at_most_once, the.at_least_once])
@pytest.mark.parametrize("size", [1, 4])
def test_a_table_with_a_rule_is_claimed_in_several_statements(
    ruled: None, make: the.Make, size: int
) -> None:
    """What refuses ``WITH … UPDATE`` is found out once, and costs no row anything."""
    rows = the.errands(10)
    calls: list[int] = []
    run = make(lambda row: calls.append(row.pk), batch_size=size)
    refusals: list[str] = []

    def watch(execute: Any, sql: str, *args: Any) -> Any:
        try:
            return execute(sql, *args)
        except NotSupportedError:
            refusals.append(sql)
            raise

    with connection.execute_wrapper(watch):
        report = run(limit=8)
        assert_run(report, processed=8, stopped="limit")
        assert_run(run(), processed=2)
    assert calls == [row.pk for row in rows]
    assert all(the.state(row)["done"] for row in rows)
    assert len(refusals) == 1
    assert not Errand.objects.exclude(leased_until=None, claimed_at=None).exists()


@pytest.mark.django_db
def test_nor_does_it_cost_the_transaction_of_a_test_case(ruled: None) -> None:
    the.errands(3)
    with transaction.atomic():
        transaction.get_connection().atomic_blocks[-1]._from_testcase = True
        assert_run(the.at_least_once(the.ignore)(), processed=3)
