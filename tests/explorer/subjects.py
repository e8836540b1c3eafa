"""What is explored: a processor of each delivery, over each kind of question."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from django.db import connection, transaction
from django.db.models import F, Q, QuerySet

from dcl_processor import BatchProcessor, Delivery, Lease, Report, Retry, batch_processor
from dcl_processor.exceptions import TransactionLost
from tests import seams
from tests.models import Errand, Parcel, Receipt

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

    ``tries``: its runs try the flips first, as the first run of a process does. ``chooses``: its
    claims may choose from the first on, as they do once another copy was met; that takes more rows
    than one. ``once``: a row whose copy has died is left to a person.
    """

    name: str
    processor: BatchProcessor[Any]
    make: Callable[[list[int]], object]
    set_back: str
    ask_done: str
    ask_leased: str = "SELECT id FROM tests_errand WHERE leased_until IS NOT NULL"
    #: How often each row was made pending again.
    ask_edited: str = "SELECT id, place FROM tests_errand WHERE place > 0"
    tries: bool = False
    chooses: bool = False
    once: bool = False
    #: What a handler's row may fail by.
    fails_by: tuple[type[Exception], ...] = ()

    #: In how many keys the rows are; by the remainder of their number.
    keys: int = 0
    #: How many rows of a key may be in flight at once, and whether they are handled in order.
    most: int = 0
    in_order: bool = False
    #: The key of each row in flight; without it, a row is in flight until its copy's transaction
    #: ends.
    ask_in_flight: str = ""

    #: What comes after it, in all workers but the first, which is at work on the first stage alone.
    second: BatchProcessor[Any] | None = None

    #: What the time until a run that is not watched changes.
    later: str = ""

    @property
    def stages(self) -> int:
        return 1 if self.second is None else 2

    def run(self) -> Report:
        """Run as one copy does that does not come back for what others have locked."""
        if self.later and not here().watched:
            with connection.cursor() as cursor:
                cursor.execute(self.later)
        report = self._run(self.processor)
        if self.second is None or (here().watched and here().number == 0):
            return report
        second = self._run(self.second)
        both = {name: getattr(report, name) + getattr(second, name) for name in COUNTS}
        return replace(second, failures=[*report.failures, *second.failures], **both)

    def _run(self, processor: BatchProcessor[Any]) -> Report:
        if self.tries:
            processor = seams.untried(processor)
        return processor.run(wait_for_locked=0)

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


def fail_first(row: Errand) -> None:
    """Fail while the run is watched, if the row is the first one of its key."""
    here().handle(row.pk)
    if row.pk == FIRST and here().watched:
        raise ValueError("not yet")


def handle_again(row: Errand) -> None:
    here().handle(row.pk, stage=1)


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


def print_receipt(row: Parcel) -> None:
    here().handle(row.pk)
    Receipt.objects.filter(parcel_id=row.pk).update(printed=True)


def make_errands(pks: list[int]) -> None:
    Errand.objects.all().delete()
    Errand.objects.bulk_create(Errand(pk=pk) for pk in pks)


def make_in_keys(keys: int, pks: list[int]) -> None:
    Errand.objects.all().delete()
    Errand.objects.bulk_create(Errand(pk=pk, attempts=pk % keys) for pk in pks)


def make_receipts(pks: list[int]) -> None:
    Parcel.objects.all().delete()
    Parcel.objects.bulk_create(Parcel(pk=pk) for pk in pks)
    Receipt.objects.bulk_create(Receipt(pk=pk, parcel_id=pk) for pk in pks)


SET_BACK = (
    "UPDATE tests_errand SET done = false, claimed = false, claimed_at = NULL,"
    " leased_until = NULL, dead = false, attempts = 0, place = 0, result = ''"
)


def errands(
    name: str, handler: Callable[[Errand], None] = handle, *, tries: bool = False, **options: Any
) -> Subject:
    return Subject(
        name,
        batch_processor(name=f"explorer.{name}", **options)(handler),
        make_errands,
        SET_BACK,
        "SELECT id FROM tests_errand WHERE done",
        tries=tries,
        once=options.get("delivery") == Delivery.AT_MOST_ONCE,
    )


DONE: dict[str, Any] = {"done": {"done": True}}
CLAIM: dict[str, Any] = {
    "delivery": Delivery.AT_MOST_ONCE,
    "claim": {"claimed": True},
    "claimed_at": "claimed_at",
    "done": {"done": True, "claimed": False},
}
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
    errands("transactional_trying", pending=own, tries=True, **DONE),
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
    errands("claim_trying", pending=own, tries=True, **CLAIM),
]
AT_LEAST_ONCE = [
    errands("lease", pending=own, **LEASE),
    errands("lease_spanning", pending=spanning, **LEASE),
    errands("lease_trying", pending=own, tries=True, **LEASE),
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
#: Rows that may become pending again at any step.
EDITED = [
    replace(
        errands("transactional_edited", note_place, pending=own, **DONE),
        ask_done="SELECT id FROM tests_errand WHERE done AND result = place::text",
    )
]
#: Leases with a mark, which is written and removed with the lease.
MARKED = [
    errands("lease_marked", pending=marked, **MARK),
    errands("lease_marked_trying", pending=marked, tries=True, **MARK),
]
#: Two processors of one model that share their lease; by ``actors.STAGE`` the rows of the second
#: differ from those of the first.
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
#: How the rows of a key are handled: what is added to a processor, and how many may be in flight.
MODES: dict[str, tuple[dict[str, Any], int]] = {
    "by_key": ({}, 1),
    "in_order": ({"in_order": True}, 1),
    "two_at_once": ({"max_per_group": 2}, 2),
}
#: What is in flight according to the rows, by the clock of the actors.
CLAIMED_KEYS = "SELECT attempts FROM tests_errand WHERE claimed AND claimed_at IS NOT NULL"
LEASED_KEYS = (
    "SELECT attempts FROM tests_errand, explorer.clock"
    " WHERE leased_until > statement_timestamp() + make_interval(secs => passed)"
)
BY_KEY: dict[str, tuple[dict[str, Any], str]] = {
    "transactional": (DONE, ""),
    "claim": (CLAIM, CLAIMED_KEYS),
    "lease": (LEASE, LEASED_KEYS),
}


def keyed(
    delivery: str,
    mode: str,
    handler: Callable[[Errand], None] = handle,
    *,
    keys: int = 2,
    more: str = "",
    **options: Any,
) -> Subject:
    """Have rows in keys. Their column is one that nothing else here looks at."""
    common, ask_in_flight = BY_KEY[delivery]
    of_mode, most = MODES[mode]
    return replace(
        errands(
            f"{delivery}_{mode}{more}",
            handler,
            pending=own,
            group_by="attempts",
            **{**common, **of_mode, **options},
        ),
        keys=keys,
        most=most,
        in_order="in_order" in of_mode,
        ask_in_flight=ask_in_flight,
        make=partial(make_in_keys, keys),
        set_back=SET_BACK.replace("attempts = 0", f"attempts = id % {keys}"),
    )


def _named(subjects: Iterable[Subject]) -> dict[str, Subject]:
    return {each.name: each for each in subjects}


#: Rows in two keys, of which one has more than one row.
KEYED = _named(keyed(delivery, mode) for delivery in BY_KEY for mode in MODES)
#: Two rows of one key: fewer schedules, and each copy wants what the other one has.
ONE_KEY = _named(
    keyed(delivery, mode, keys=1, more="_one_key") for delivery in BY_KEY for mode in MODES
)
#: Rows that are claimed together, and whose number in flight the look at the siblings cuts.
KEYED_BATCHES = _named(
    keyed(delivery, "two_at_once", more="_batch", batch_size=2) for delivery in BY_KEY
)
#: A head that waits for its next attempt; the column of the key is no counter here.
WAITS = Retry(None, attempts="place", last_error=None, backoff=3600, jitter=0)


def headed(delivery: str, more: str, **options: Any) -> Subject:
    """Have a key whose first row fails."""
    subject = keyed(delivery, "in_order", fail_first, keys=1, more=more, **options)
    return replace(
        subject,
        fails_by=(ValueError,),
        ask_edited="SELECT id, place FROM tests_errand WHERE false",
        set_back=subject.set_back.replace("dead = false", "dead = false, next_attempt_at = NULL"),
        later="UPDATE tests_errand SET next_attempt_at = NULL WHERE next_attempt_at IS NOT NULL",
    )


#: Rows behind a head that fails, or that waits after its failure. A claim without a retry would
#: leave the head in doubt.
HEADS = _named(
    [
        headed("transactional", "_failing_head"),
        headed("lease", "_failing_head"),
        headed("transactional", "_waiting_head", retry=WAITS),
        headed("claim", "_waiting_head", retry=WAITS, reset={"claimed": False}),
        headed("lease", "_waiting_head", retry=WAITS),
    ]
)
SUBJECTS = _named([*TRANSACTIONAL, *AT_MOST_ONCE, *AT_LEAST_ONCE])
MORE = _named([*WILFUL, *EDITED, *MARKED, PIPELINE])
CHOOSING = {
    f"{each.name}_choosing": replace(each, name=f"{each.name}_choosing", chooses=True)
    for each in SUBJECTS.values()
    if not each.tries and each.name not in ("claim_spanning", "lease_spanning")
}
EVERY = {**SUBJECTS, **MORE, **CHOOSING, **KEYED, **ONE_KEY, **KEYED_BATCHES, **HEADS}
#: Those whose leases may lapse. Not that of the handler which writes back an old lease and
#: an old flag, even if another worker has the row: no settlement can help that.
LAPSING = [name for name in MORE if name.startswith("lease") and name != "lease_saving_another"]
#: Those whose leases are renewed twice.
BEATING = ["lease_saving", "lease_saving_another", "lease_locking"]
