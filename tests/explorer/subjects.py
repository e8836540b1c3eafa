"""What is explored: a processor of each delivery, over each kind of question."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from django.db.models import QuerySet

from dcl_processor import BatchProcessor, Delivery, Lease, Report, batch_processor
from dcl_processor.runner.run import Run
from tests.models import Errand, Parcel, Receipt

from .actors import here

#: Keys that nothing else in a statement has; the last digit is the row's number.
FIRST = 7_000_001


@dataclass(frozen=True)
class Subject:
    """A processor, and how its rows are made, set back and looked at from outside.

    ``rehearsed``: its runs take the flips for granted, as they do after their first row, but for
    the ``doubtful`` ones, whose rows are asked about one by one. ``chooses``: its claims may choose
    from the first on, as they do once another copy was met; that takes more rows than one.
    """

    name: str
    processor: BatchProcessor[Any]
    make: Callable[[list[int]], object]
    set_back: str
    ask_done: str
    rehearsed: bool = False
    doubtful: frozenset[str] = frozenset()
    chooses: bool = False

    def run(self) -> Report:
        """Run as one copy does that does not come back for what others have locked."""
        run = Run(
            self.processor,
            filter=None,
            using=None,
            limit=None,
            timeout=None,
            wait_for_locked=0,
            concurrency=1,
            stop=None,
        )
        run.rehearsed, run.doubtful = self.rehearsed, set(self.doubtful)
        return run.report()

    def __str__(self) -> str:
        return self.name


def own() -> QuerySet[Errand]:
    return Errand.objects.filter(done=False, claimed=False)


def spanning() -> QuerySet[Errand]:
    """Ask the same through a subquery, whose answer is as old as its statement's snapshot."""
    return Errand.objects.filter(pk__in=own().values("pk"))


def joined() -> QuerySet[Parcel]:
    """Ask for a flag that is beside the row."""
    return Parcel.objects.filter(receipt__printed=False)


def handle(row: Errand) -> None:
    here().handle(row.pk)


def print_receipt(row: Parcel) -> None:
    here().handle(row.pk)
    Receipt.objects.filter(parcel_id=row.pk).update(printed=True)


def make_errands(pks: list[int]) -> None:
    Errand.objects.all().delete()
    Errand.objects.bulk_create(Errand(pk=pk) for pk in pks)


def make_receipts(pks: list[int]) -> None:
    Parcel.objects.all().delete()
    Parcel.objects.bulk_create(Parcel(pk=pk) for pk in pks)
    Receipt.objects.bulk_create(Receipt(pk=pk, parcel_id=pk) for pk in pks)


def errands(
    name: str, *, rehearsed: bool = False, doubtful: Collection[str] = (), **options: Any
) -> Subject:
    return Subject(
        name,
        batch_processor(name=f"explorer.{name}", **options)(handle),
        make_errands,
        "UPDATE tests_errand SET done = false, claimed = false, claimed_at = NULL,"
        " leased_until = NULL",
        "SELECT id FROM tests_errand WHERE done",
        rehearsed,
        frozenset(doubtful),
    )


DONE: dict[str, Any] = {"done": {"done": True}}
CLAIM: dict[str, Any] = {
    "delivery": Delivery.AT_MOST_ONCE,
    "claim": {"claimed": True},
    "claimed_at": "claimed_at",
    "done": {"done": True, "claimed": False},
}
LEASE: dict[str, Any] = {**DONE, "delivery": Delivery.AT_LEAST_ONCE, "lease": Lease(300)}

TRANSACTIONAL = [
    errands("transactional", pending=own, **DONE),
    errands("transactional_spanning", pending=spanning, **DONE),
    Subject(
        "transactional_joined",
        batch_processor(pending=joined, name="explorer.transactional_joined")(print_receipt),
        make_receipts,
        "UPDATE tests_receipt SET printed = false",
        "SELECT parcel_id FROM tests_receipt WHERE printed",
    ),
]
AT_MOST_ONCE = [
    errands("claim", pending=own, **CLAIM),
    errands("claim_spanning", pending=spanning, **CLAIM),
    errands("claim_rehearsed", pending=own, rehearsed=True, **CLAIM),
    errands(
        "claim_spanning_rehearsed",
        pending=spanning,
        rehearsed=True,
        doubtful={"claim", "done"},
        **CLAIM,
    ),
]
AT_LEAST_ONCE = [
    errands("lease", pending=own, **LEASE),
    errands("lease_spanning", pending=spanning, **LEASE),
    errands("lease_rehearsed", pending=own, rehearsed=True, **LEASE),
    errands(
        "lease_spanning_rehearsed", pending=spanning, rehearsed=True, doubtful={"done"}, **LEASE
    ),
]
SUBJECTS = {each.name: each for each in [*TRANSACTIONAL, *AT_MOST_ONCE, *AT_LEAST_ONCE]}
CHOOSING = {
    f"{name}_choosing": replace(SUBJECTS[name], name=f"{name}_choosing", chooses=True)
    for name in (
        "transactional",
        "transactional_spanning",
        "transactional_joined",
        "claim",
        "claim_rehearsed",
        "lease_rehearsed",
    )
}
