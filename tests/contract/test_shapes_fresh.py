"""I3: the handler gets the row as it is under the lock, with all that the queryset loads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection
from django.db.models import Count, F, Prefetch, QuerySet
from django.test.utils import CaptureQueriesContext

from dcl_processor import batch_processor
from tests.contract.support.gate import run_and_meanwhile
from tests.contract.support.reports import assert_run
from tests.models import Depot, Parcel, Scan

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

parcels = Parcel.objects.filter(sent=False)
Look = Callable[[Any], Any]
Change = Callable[[Parcel], Any]


def seen(queryset: Any, look: Look, change: Callable[[], Any] | None) -> list[Any]:
    """Run, while another session changes something, and return what the handler saw.

    What it saw was loaded with the row: it costs no further statement.
    """
    views: list[Any] = []

    @batch_processor(pending=queryset.filter(sent=False), done={"sent": True})
    def send(row: Parcel) -> None:
        with CaptureQueriesContext(connection) as queries:
            views.append(look(row))
        assert not queries

    report = run_and_meanwhile(send, change) if change else send()
    assert_run(report.raise_for_failures(), processed=len(views))
    return views


def outside() -> QuerySet[Parcel]:
    return Parcel.objects.using("other")


def to_the_south(row: Parcel) -> Any:
    south = Depot.objects.using("other").get(name="south")
    return outside().filter(pk=row.pk).update(depot=south)


def to_nowhere(row: Parcel) -> Any:
    return outside().filter(pk=row.pk).update(depot=None)


def rename_the_depot(row: Parcel) -> Any:
    return Depot.objects.using("other").filter(name="north").update(name="renamed")


def scan_again(row: Parcel) -> Any:
    return Scan.objects.using("other").create(parcel_id=row.pk)


def edit(row: Parcel) -> Any:
    return outside().filter(pk=row.pk).update(note="edited")


def depot(row: Parcel) -> str | None:
    return row.depot.name if row.depot else None


def scans(row: Parcel) -> int:
    return len(row.scans.all())


counted = Scan.objects.values("parcel").annotate(n=Count("pk")).values("n")
FRESH: dict[str, tuple[Any, Look, Change, Any]] = {
    "re-pointed": (parcels.select_related("depot"), depot, to_the_south, "south"),
    "pointed to nothing": (parcels.select_related("depot"), depot, to_nowhere, None),
    "edited beside": (parcels.select_related("depot"), depot, rename_the_depot, "renamed"),
    "edited": (parcels, lambda row: row.note, edit, "edited"),
    "annotated across": (
        parcels.annotate(where=F("depot__name")),
        lambda row: row.where,
        rename_the_depot,
        "renamed",
    ),
    "counted": (parcels.annotate(n=Count("scans")), lambda row: row.n, scan_again, 3),
    "fetched": (parcels.prefetch_related("scans"), scans, scan_again, 3),
    "fetched by a queryset": (
        parcels.prefetch_related(Prefetch("scans", Scan.objects.filter(ok=True), to_attr="good")),
        lambda row: len(row.good),
        scan_again,
        3,
    ),
}


@pytest.mark.parametrize("case", FRESH)
def test_i3_what_changed_between_the_snapshot_and_the_lock_is_seen(case: str) -> None:
    queryset, look, change, expected = FRESH[case]
    Depot.objects.create(name="south")
    row = Parcel.objects.create(depot=Depot.objects.create(name="north"))
    Scan.objects.create(parcel=row)
    Scan.objects.create(parcel=row)
    # What a queryset loaded for one row it loads again for the next.
    before = seen(queryset, look, None)
    Parcel.objects.update(sent=False)
    assert before != [expected]
    assert seen(queryset, look, lambda: change(row)) == [expected]


def test_i3_what_is_prefetched_is_loaded_for_each_row_of_a_run() -> None:
    for _ in range(4):
        Scan.objects.create(parcel=Parcel.objects.create())
    assert seen(parcels.prefetch_related("scans"), scans, None) == [1, 1, 1, 1]


def test_i3_a_related_manager_does_not_hand_out_its_own_old_instance() -> None:
    north = Depot.objects.create(name="north")
    Parcel.objects.create(depot=north)
    Parcel.objects.create(depot=north)
    Depot.objects.update(name="renamed")
    depots: list[Any] = []

    @batch_processor(pending=north.parcels.filter(sent=False), done={"sent": True})
    def send(row: Parcel) -> None:
        depots.append(row.depot)

    assert_run(send(), processed=2)
    assert [each.name for each in depots] == ["renamed", "renamed"]
    assert depots[0] is not depots[1]


def test_deferral_is_the_querysets_own() -> None:
    Parcel.objects.create(depot=Depot.objects.create(name="north"))
    deferred: list[set[str]] = []

    def run(queryset: QuerySet[Parcel]) -> set[str]:
        handle = batch_processor(pending=queryset.filter(sent=False), done={"sent": True})
        handle(lambda row: deferred.append(row.get_deferred_fields()))()
        Parcel.objects.update(sent=False)
        return deferred.pop()

    everything = {field.attname for field in Parcel._meta.concrete_fields}
    assert run(parcels) == run(parcels.select_related("depot")) == set()
    assert run(parcels.only("note")) == everything - {"id", "note"}
    assert run(parcels.defer("note")) == {"note"}
    assert run(parcels.filter(depot__name="north").only("note")) == everything - {"id", "note"}
    joined = parcels.select_related("depot").only("note", "depot__name")
    assert run(joined) == everything - {"id", "note", "depot_id"}
