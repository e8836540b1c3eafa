"""What is explored: a processor of each delivery, over each kind of question."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from django.db import connection, transaction
from django.db.models import F, Q, QuerySet

from dcl_processor import BatchProcessor, Delivery, Lease, Report, batch_processor
from dcl_processor.exceptions import TransactionLost
from dcl_processor.runner.run import Run
from dcl_processor.settlement.rehearsal import Rehearsal
from tests.models import Errand, Express, Parcel, Receipt

from .actors import here

#: Keys that nothing else in a statement has; the last digit is the row's number.
FIRST = 7_000_001

#: The actor who makes a row pending again.
EDITOR = "editor"


#: What the reports of two stages are added up by.
COUNTS = ("processed", "failed", "skipped", "stale", "lease_lost")


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
    ask_leased: str = "SELECT id FROM tests_errand WHERE leased_until IS NOT NULL"
    #: How often each row was made pending again.
    ask_edited: str = "SELECT id, place FROM tests_errand WHERE place > 0"
    rehearsed: bool = False
    doubtful: frozenset[str] = frozenset()
    chooses: bool = False
    #: Whether a COMMIT waits for the next claim from the first row on, and not after a success.
    waits: bool = False
    #: What a handler's row may fail by.
    fails_by: tuple[type[Exception], ...] = ()

    #: In how many keys the rows are, one after another in each; by the remainder of their number.
    keys: int = 0

    #: What comes after it, in all copies but the first, which is at work on the first stage alone.
    second: BatchProcessor[Any] | None = None

    @property
    def stages(self) -> int:
        return 1 if self.second is None else 2

    def run(self) -> Report:
        """Run as one copy does that does not come back for what others have locked."""
        report = self._run(self.processor)
        if self.second is None or (here().watched and here().number == 0):
            return report
        second = self._run(self.second)
        both = {name: getattr(report, name) + getattr(second, name) for name in COUNTS}
        return replace(second, failures=[*report.failures, *second.failures], **both)

    def _run(self, processor: BatchProcessor[Any]) -> Report:
        run = Run(
            processor,
            filter=None,
            using=None,
            limit=None,
            max_failures=None,
            timeout=None,
            wait_for_locked=0,
            wait_for_slot=0,
            concurrency=1,
            stop=None,
        )
        if self.rehearsed:
            run.context.rehearsal = Rehearsal(set(self.doubtful), {})
        if self.waits:
            vars(run.dispatcher)["_may_wait"] = lambda: True
        return run.execute()

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


def handle_again(row: Errand) -> None:
    here().handle(row.pk, stage=1)


def two_tables() -> QuerySet[Express]:
    """Ask for a flag in the parent's table; the lease is in the row's own."""
    return Express.objects.filter(done=False, claimed=False)


def handled_once() -> QuerySet[Errand]:
    """Ask for what the first of two stages has left."""
    return Errand.objects.filter(done=True, dead=False)


def without_flags() -> QuerySet[Errand]:
    """Leave out what a ``save()`` by a handler whose lease was lost would take back."""
    return own().defer("done", "claimed")


def save(row: Errand) -> None:
    """Write back the row that was handed over, whole."""
    here().handle(row.pk)
    row.result = "saved"
    row.save()


def save_another(row: Errand) -> None:
    """Write back an instance of the handler's own, lease and all."""
    mine = Errand.objects.get(pk=row.pk)
    here().handle(row.pk)
    mine.result = "saved"
    mine.save()


def lock(row: Errand) -> None:
    """Keep the row locked for a while."""
    with transaction.atomic():
        here().may_wait = True
        [_] = Errand.objects.filter(pk=row.pk).select_for_update(no_key=True)
        here().may_wait = False
        here().handle(row.pk)


def end_transaction(row: Errand) -> None:
    """End the transaction that has the row's lock, where another copy is at work, and begin one."""
    here().handle(row.pk)
    if here().watched and here().number == 0:
        with connection.cursor() as cursor:
            cursor.execute("COMMIT; BEGIN")


def note_place(row: Errand) -> None:
    """Write what was found, so that it can be seen which edit that was."""
    here().handle(row.pk)
    Errand.objects.filter(pk=row.pk).update(result=row.place)


def edit() -> None:
    """Be the job of an actor: change the first row, which is to be handled again then."""
    Errand.objects.filter(pk=FIRST).update(done=False, place=F("place") + 1)


def marked() -> QuerySet[Errand]:
    """Ask for rows that stay pending under a mark as long as they have a lease."""
    leased = Q(claimed=True, leased_until__isnull=False)
    return Errand.objects.filter(Q(claimed=False) | leased, done=False)


def versions() -> QuerySet[Errand]:
    """Ask for rows that have changed since the version that was handled last."""
    return Errand.objects.filter(claimed=False, attempts__lte=F("place"))


def print_receipt(row: Parcel) -> None:
    here().handle(row.pk)
    Receipt.objects.filter(parcel_id=row.pk).update(printed=True)


def make_errands(pks: list[int]) -> None:
    Errand.objects.all().delete()
    Errand.objects.bulk_create(Errand(pk=pk) for pk in pks)


def make_in_two_keys(pks: list[int]) -> None:
    Errand.objects.all().delete()
    Errand.objects.bulk_create(Errand(pk=pk, attempts=pk % 2) for pk in pks)


def make_express(pks: list[int]) -> None:
    Express.objects.all().delete()
    for pk in pks:
        Express(pk=pk).save()


def make_receipts(pks: list[int]) -> None:
    Parcel.objects.all().delete()
    Parcel.objects.bulk_create(Parcel(pk=pk) for pk in pks)
    Receipt.objects.bulk_create(Receipt(pk=pk, parcel_id=pk) for pk in pks)


def errands(
    name: str,
    handler: Callable[[Errand], None] = handle,
    *,
    rehearsed: bool = False,
    doubtful: Collection[str] = (),
    **options: Any,
) -> Subject:
    return Subject(
        name,
        batch_processor(name=f"explorer.{name}", **options)(handler),
        make_errands,
        "UPDATE tests_errand SET done = false, claimed = false, claimed_at = NULL,"
        " leased_until = NULL, dead = false, attempts = 0, place = 0, result = ''",
        "SELECT id FROM tests_errand WHERE done",
        rehearsed=rehearsed,
        doubtful=frozenset(doubtful),
    )


def expresses(name: str, **options: Any) -> Subject:
    def handler(row: Express) -> None:
        here().handle(row.pk)

    return Subject(
        name,
        batch_processor(name=f"explorer.{name}", pending=two_tables, **options)(handler),
        make_express,
        "UPDATE tests_freight SET done = false, claimed = false;"
        " UPDATE tests_express SET claimed_at = NULL, leased_until = NULL",
        "SELECT id FROM tests_freight WHERE done",
        "SELECT freight_ptr_id FROM tests_express WHERE leased_until IS NOT NULL",
    )


DONE: dict[str, Any] = {"done": {"done": True}}
CLAIM: dict[str, Any] = {
    "delivery": Delivery.AT_MOST_ONCE,
    "claim": {"claimed": True},
    "claimed_at": "claimed_at",
    "done": {"done": True, "claimed": False},
}
KEYS: dict[str, Any] = {"group_by": "attempts", "in_order": True}
LEASE: dict[str, Any] = {**DONE, "delivery": Delivery.AT_LEAST_ONCE, "lease": Lease(300)}
MARK: dict[str, Any] = {
    **LEASE,
    "claim": {"claimed": True},
    "claimed_at": "claimed_at",
    "reset": {"claimed": False},
    "done": {"done": True, "claimed": False},
}

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
#: Multi-table inheritance.
TWO_TABLES = [
    expresses("transactional_two_tables", **DONE),
    expresses("claim_two_tables", **CLAIM),
    expresses("lease_two_tables", **LEASE),
]
#: Handlers that write, or lock, the row that they handle, or end its transaction.
WILFUL = [
    errands("lease_saving", save, pending=without_flags, **LEASE),
    errands("lease_saving_another", save_another, pending=without_flags, **LEASE),
    errands("lease_locking", lock, pending=own, **LEASE),
    replace(
        errands("transactional_ending", end_transaction, pending=own, **DONE),
        fails_by=(TransactionLost,),
    ),
]
VERSIONS: dict[str, Any] = {"pending": versions, "repeats": True}
HANDLED = "SELECT id FROM tests_errand WHERE attempts > place"
#: Rows that may become pending again at any step.
EDITED = [
    replace(
        errands("transactional_edited", note_place, pending=own, **DONE),
        ask_done="SELECT id FROM tests_errand WHERE done AND result = place::text",
    ),
    replace(
        errands(
            "claim_edited",
            **{**CLAIM, **VERSIONS, "done": lambda r: {"attempts": r.place + 1, "claimed": False}},
        ),
        ask_done=HANDLED,
    ),
    replace(
        errands(
            "lease_edited", **{**LEASE, **VERSIONS, "done": lambda r: {"attempts": r.place + 1}}
        ),
        ask_done=HANDLED,
    ),
]
#: Leases with a mark, which is written and removed with the lease.
MARKED = [
    errands("lease_marked", pending=marked, **MARK),
    errands("lease_marked_rehearsed", pending=marked, rehearsed=True, **MARK),
    errands(
        "lease_marked_doubtful",
        pending=marked,
        rehearsed=True,
        doubtful={"claim", "done"},
        **MARK,
    ),
]
#: Two processors of one model that share their lease; by ``actors.STAGE`` the rows of the second
#: are told from those of the first.
PIPELINE = replace(
    errands("lease_pipeline", pending=own, **LEASE),
    second=batch_processor(
        **{**LEASE, "pending": handled_once, "done": {"dead": True}},
        name="explorer.lease_pipeline_second",
    )(handle_again),
    ask_done="SELECT id FROM tests_errand WHERE done"
    " UNION ALL SELECT id + 100 FROM tests_errand WHERE dead",
    ask_leased="SELECT id + CASE WHEN done THEN 100 ELSE 0 END FROM tests_errand"
    " WHERE leased_until IS NOT NULL",
)
#: Rows in two keys, each in order. Their column is one that nothing else here looks at.
IN_ORDER = {
    each.name: replace(
        each,
        keys=2,
        make=make_in_two_keys,
        set_back="UPDATE tests_errand SET done = false, claimed = false, claimed_at = NULL,"
        " leased_until = NULL, dead = false, place = 0, result = '', attempts = id % 2",
    )
    for each in (
        errands("transactional_in_order", pending=own, **DONE, **KEYS),
        errands("claim_in_order", pending=own, **CLAIM, **KEYS),
        errands("lease_in_order", pending=own, **LEASE, **KEYS),
    )
}
SUBJECTS = {each.name: each for each in [*TRANSACTIONAL, *AT_MOST_ONCE, *AT_LEAST_ONCE]}
MORE = {each.name: each for each in [*TWO_TABLES, *WILFUL, *EDITED, *MARKED, PIPELINE]}
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
#: Rows whose last statements are sent with the claim of the next row; that takes several rows.
WAITING = {
    f"{name}_waiting": replace(SUBJECTS[name], name=f"{name}_waiting", rehearsed=True, waits=True)
    for name in ("transactional", "transactional_spanning", "claim_rehearsed", "lease_rehearsed")
}
#: Those of them whose leases may lapse. Not that of the handler which writes back an old lease and
#: an old flag, whoever has the row by now: no settlement can help that.
LAPSING = [
    *("lease_two_tables", "lease_saving", "lease_locking", "lease_edited", "lease_pipeline"),
    *("lease_marked", "lease_marked_rehearsed"),
]
#: Those whose leases are renewed twice.
BEATING = ["lease_two_tables", "lease_saving", "lease_saving_another", "lease_locking"]
