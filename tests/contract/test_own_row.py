"""Handlers of AT_LEAST_ONCE that lock their own row, or insert children of it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction

from dcl_processor import BatchProcessor, Delivery, Lease, Report
from tests.contract.support import errands as the
from tests.contract.support.deadlocks import wait_until_a_session_waits
from tests.contract.support.gate import HAS_ROW_LOCKS
from tests.contract.support.parcels import in_batches
from tests.contract.support.reports import assert_run
from tests.models import Parcel, Scan
from tests.waiting import until

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

SHORT = Lease(1.5)


def leased_until(row: Parcel) -> Any:
    return Parcel.objects.using("other").values_list("leased_until", flat=True).get(pk=row.pk)


if HAS_ROW_LOCKS:

    def lock(row: Parcel) -> None:
        list(Parcel.objects.filter(pk=row.pk).select_for_update())

    def insert_a_child(row: Parcel) -> None:
        Scan.objects.create(parcel=row)

    def parcels(handler: Callable[[Parcel], None]) -> BatchProcessor[Parcel]:
        return in_batches(handler, delivery=Delivery.AT_LEAST_ONCE, lease=SHORT)

    # PostgreSQL's foreign keys take a lock that lets the heartbeat through.
    ways = [lock] if connection.vendor == "postgresql" else [lock, insert_a_child]

    @pytest.mark.parametrize("hold", ways)
    @pytest.mark.parametrize("holder", ["default", "stranger"])
    def test_a_row_that_is_locked_for_longer_than_its_lease_stays_ours(
        hold: Any, holder: str
    ) -> None:
        """The heartbeat stands in the queue when the lock is released, before any other copy."""
        first, other = (Parcel.objects.create() for _ in range(2))
        handled: list[Any] = []
        reports: list[Report] = []
        second = parcels(lambda row: handled.append("second"))

        def keep_it_locked(row: Parcel) -> None:
            until(lambda: leased_until(row) < leased_until(other))
            until(
                lambda: (
                    leased_until(other) > leased_until(row) + timedelta(seconds=SHORT.seconds + 0.2)
                )
            )
            wait_until_a_session_waits()

        def lock_elsewhere(row: Parcel) -> None:
            with transaction.atomic():
                hold(row)
                keep_it_locked(row)

        def handle(row: Parcel) -> None:
            handled.append(row.pk)
            if row.pk != first.pk:
                return
            if holder == "stranger":
                the.elsewhere(lambda: lock_elsewhere(row))
            else:
                lock_elsewhere(row)
            narrowed: dict[str, Any] = {"wait_for_locked": 0, "filter": the.only(row)}
            before = leased_until(row)
            until(lambda: leased_until(row) > before)
            reports.append(the.elsewhere(lambda: second(**narrowed)))

        reports.append(parcels(handle)())
        assert handled == [first.pk, other.pk]
        during, after = reports
        assert_run(during)
        assert_run(after, processed=2)
        assert not Parcel.objects.filter(leased_until__isnull=False).exists()
