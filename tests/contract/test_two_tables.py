"""A row in two tables (multi-table inheritance) is settled, put back and requeued as one row.

Django writes to such a row by a SELECT and an UPDATE for each table. Between any two of these
another worker may take the row over, or the process may be killed.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import timedelta
from threading import Event
from typing import Any, NamedTuple

import pytest
from django.db import connection, transaction
from django.db.models import Model, Q
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from dcl_processor import BatchProcessor, Delivery, Lease, Report, Retry, batch_processor
from dcl_processor.candidates.question import ask
from dcl_processor.engine.heartbeat import Heartbeat
from tests.contract.support import errands as the
from tests.contract.support.deadlocks import wait_until_a_session_waits
from tests.contract.support.gate import HAS_GATE, HAS_ROW_LOCKS
from tests.contract.support.reports import assert_run
from tests.contract.support.sessions import before_statement, part_locked
from tests.contract.support.temporary import at_update, execute
from tests.models import Express, Freight, RoadTrain, Truck, Vehicle

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

COLUMNS = ("done", "dead", "claimed", "result", "claimed_at", "leased_until", "attempts")


class Lapsed(Lease):
    """A lease that every other worker takes for lapsed."""

    def free(self) -> Q:
        return Q(pk__isnull=False)


LEASED: dict[str, Any] = {
    "delivery": Delivery.AT_LEAST_ONCE,
    "lease": Lapsed(60),
    "retry": Retry(max_attempts=9, backoff=0, jitter=0),
}
CLAIMED: dict[str, Any] = {
    "delivery": Delivery.AT_MOST_ONCE,
    "claim": {"claimed": True},
    "claimed_at": "claimed_at",
    "reset": {"claimed": False},
}
KINDS = {"lease": LEASED, "claim": CLAIMED}
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def processor(handler: Callable[..., Any], kind: Any, **options: Any) -> BatchProcessor[Express]:
    options = {
        "pending": Express.objects.filter(done=False, dead=False, claimed=False),
        "done": {"done": True, "claimed": False, "result": "settled"},
        **kind,
        **options,
    }
    return batch_processor(**options)(handler)


def rows(number: int, **values: Any) -> list[Express]:
    return [Express.objects.create(**values) for _ in range(number)]


def state(row: Express, using: str = "other") -> dict[str, Any]:
    said: dict[str, Any] = Express.objects.using(using).values(*COLUMNS).get(pk=row.pk)
    return said


def is_write(sql: str) -> bool:
    return sql.startswith("UPDATE") and "1 = 0" not in sql


def is_locked(row: Express) -> bool:
    """Tell whether both parts of the row are locked by another session."""
    free = [
        model.objects.using("other").filter(pk=row.pk).select_for_update(skip_locked=True)
        for model in (Freight, Express)
    ]
    return not any(the.elsewhere(lambda rows=rows: _locked_rows(rows)) for rows in free)  # type: ignore[misc]  # a default


def _locked_rows(rows: Any) -> list[Any]:
    with transaction.atomic(using="other"):
        return list(rows.values_list("pk", flat=True))


if HAS_ROW_LOCKS:

    @pytest.mark.parametrize("at", [0, 1], ids=["first row", "later row"])
    def test_a_worker_that_comes_during_a_settlement_does_not_take_the_row(at: int) -> None:
        """The lease has lapsed by then; the settlement has looked, and not written yet."""
        made = rows(2)
        handled: list[Any] = []
        reports: list[Report] = []
        second = processor(lambda row: handled.append("second"), LEASED)

        def come() -> None:
            row = Q(pk=made[at].pk)
            reports.append(the.elsewhere(lambda: second(filter=row, wait_for_locked=0)))

        first = processor(lambda row: handled.append(row.pk), LEASED)

        def is_this_one(sql: str) -> bool:
            return is_write(sql) and len(handled) == at + 1

        with before_statement(is_this_one, come):
            reports.append(first(filter=Q(pk__in=[row.pk for row in made])))
        assert handled == [row.pk for row in made]
        during, after = reports
        assert_run(during, skipped=1)
        assert_run(after, processed=2)
        assert [state(row)["leased_until"] for row in made] == [None, None]

    @each_kind
    def test_both_parts_are_locked_when_the_first_is_written(kind: Any) -> None:
        [row] = rows(1)
        locked: list[bool] = []
        handled: list[Any] = []
        run = processor(lambda row: handled.append(row.pk), kind)
        with before_statement(
            lambda sql: is_write(sql) and bool(handled), lambda: locked.append(is_locked(row))
        ):
            assert_run(run(), processed=1)
        assert locked == [True]


if HAS_ROW_LOCKS:

    def parts_locked(sql: Any) -> list[str]:
        """Return the tables of the statements that wait for locks, in their order."""
        waiting = [each for each in sql if " FOR " in each and "SKIP LOCKED" not in each]
        found = [re.search(r"FROM \W(tests_\w+)", each) for each in waiting]
        return [each[1] for each in found if each]

    @each_kind
    def test_a_settlement_locks_the_parts_in_the_order_in_which_save_writes_them(kind: Any) -> None:
        """Otherwise each could wait for the part that the other one has."""
        [row] = rows(1)
        run = processor(the.ignore, kind)
        with before_statement(is_write, lambda: None) as sent:
            assert_run(run(), processed=1)
        assert parts_locked(sent) == ["tests_freight", "tests_express"]
        with CaptureQueriesContext(connection) as saved:
            row.save()
        written = [each["sql"] for each in saved.captured_queries if is_write(each["sql"])]
        assert ["express" in each for each in written] == [False, True]

    @each_kind
    def test_a_settlement_waits_for_no_part_while_it_has_another(kind: Any) -> None:
        """Sessions that lock a row by a join take the parts the other way round."""
        [row] = rows(1)
        at_work, has_one, go_on = Event(), Event(), Event()

        def lock_one_and_the_other() -> None:
            the.wait(at_work)
            with transaction.atomic():
                if connection.vendor == "postgresql":
                    # This session would look for a deadlock before the settlement does, which
                    # looks after 1 s, and be its victim.
                    execute("SET LOCAL deadlock_timeout = '700ms'")
                for model in (Express, Freight):
                    part = model.objects.filter(pk=row.pk).order_by().select_for_update()
                    # Its key alone joins no table, which would be locked as well.
                    list(part.values_list(model._meta.pk.attname))
                    has_one.set()
                    the.wait(go_on)

        def handle(row: Express) -> None:
            at_work.set()
            the.wait(has_one)

        def comes_for_the_second_part(sql: str) -> bool:
            return has_one.is_set() and parts_locked([sql]) == ["tests_express"]

        def let_the_other_wait_for_the_first() -> None:
            go_on.set()
            wait_until_a_session_waits()

        with (
            the.meanwhile(lock_one_and_the_other) as results,
            before_statement(comes_for_the_second_part, let_the_other_wait_for_the_first) as sent,
        ):
            assert_run(processor(handle, kind)(), processed=1)
        assert results == [None]
        # It begins again with the part that was locked.
        order = ["tests_freight", "tests_express", "tests_express", "tests_freight"]
        assert parts_locked(sent) == order
        assert state(row)["done"]


if HAS_ROW_LOCKS:

    def test_a_heartbeat_does_not_wait_for_a_row_whose_other_part_is_locked() -> None:
        """The leases of the other rows would lapse during the wait."""
        one, two = (Truck.objects.create(leased_until=timezone.now()) for _ in range(2))
        question = ask(Truck.objects.all, label="tests", flips=None)
        heart = Heartbeat(Lease(60), "tests")
        held = {row.pk: {"leased_until": row.leased_until} for row in (one, two)}
        try:
            heart.hold(question, held, time.monotonic())
            with part_locked(Vehicle, one.pk):
                assert the.elsewhere(heart._renew)[1] == [one.pk]
        finally:
            heart.close()
        renewed = [
            Truck.objects.get(pk=row.pk).leased_until != row.leased_until for row in (one, two)
        ]
        assert renewed == [False, True]


if HAS_GATE:

    def test_a_lapsed_lease_is_not_waited_for_where_a_save_waits_for_the_row() -> None:
        """The save has the part in the parent's table, and waits for that in the row's own."""
        lapsed = timezone.now() - timedelta(days=1)
        dead, sibling = (Truck.objects.create(load=1, leased_until=each) for each in (lapsed, None))
        here, go_on = Event(), Event()

        def save() -> None:
            with transaction.atomic():
                Vehicle.objects.filter(pk=dead.pk).update(plate="new")
                here.set()
                the.wait(go_on)
                Truck.objects.filter(pk=dead.pk).update(load=1)

        run = batch_processor(
            pending=Truck.objects.filter(inspected=False),
            done={"inspected": True},
            delivery=Delivery.AT_LEAST_ONCE,
            lease=Lease(60),
            group_by="load",
        )(the.ignore)
        locked: list[str] = []

        def follows_the_lock_of_the_row(sql: str) -> bool:
            was_locked = bool(locked)
            if "tests_truck" in sql and " FOR " in sql:
                locked.append(sql)
            return was_locked

        def let_the_save_wait() -> None:
            go_on.set()
            wait_until_a_session_waits()

        with the.meanwhile(save) as saved:
            the.wait(here)
            with before_statement(follows_the_lock_of_the_row, let_the_save_wait):
                report = run(filter=the.only(sibling), wait_for_locked=0)
        assert saved == [None]
        assert_run(report, held=1)
        assert run().processed == 2


if connection.vendor == "postgresql":

    @pytest.mark.parametrize("table", ["tests_freight", "tests_express"])
    @pytest.mark.parametrize(
        "kind", [*KINDS.values(), {"retry": the.retry()}], ids=[*KINDS, "lock"]
    )
    def test_i26_a_flip_that_a_trigger_drops_in_one_table_is_in_neither(
        kind: Any, table: str
    ) -> None:
        [row] = rows(1)
        run = processor(the.ignore, kind, done={"done": True, "claimed": False, "attempts": 9})
        flips = "NEW.done" if table == "tests_freight" else "NEW.attempts = 9"
        with at_update(flips, "RETURN NULL", table=table):
            report = run()
        assert (report.processed, report.failed) == (0, 1)
        assert not state(row)["done"]
        assert state(row)["attempts"] < 9


class Unlocked(NamedTuple):
    """A processor, none of whose conditions is on the table that its claim writes, too."""

    model: type[Model]
    options: dict[str, Any]
    parent: type[Model]


#: The columns of the parents' tables that are free for any purpose are few.
CLAIMS = {
    "claimed_at": Unlocked(
        Truck,
        {
            "pending": Truck.objects.filter(weighed=False, load=0),
            "done": {"weighed": True},
            "delivery": Delivery.AT_MOST_ONCE,
            "claim": {"load": 1},
            "claimed_at": "leased_until",
        },
        Vehicle,
    ),
    "claim": Unlocked(
        Truck,
        {
            "pending": Truck.objects.filter(weighed=False, load=0),
            "done": {"weighed": True},
            "delivery": Delivery.AT_MOST_ONCE,
            "claim": {"load": 1, "plate": "claimed"},
        },
        Vehicle,
    ),
    "attempts": Unlocked(
        RoadTrain,
        {
            "pending": RoadTrain.objects.filter(length=0),
            "done": {"length": 1},
            "delivery": Delivery.AT_LEAST_ONCE,
            "lease": Lease(60),
            "retry": Retry(None, attempts="load", next_attempt_at=None, last_error=None),
        },
        Truck,
    ),
}
#: What is written to a row that was not handled, by the transaction that has its lock.
NOTES: dict[str, dict[str, Any]] = {
    "last_error": {"retry": Retry(None, attempts=None, next_attempt_at=None, last_error="plate")},
    "on_failure": {
        "retry": Retry(
            None,
            attempts=None,
            next_attempt_at=None,
            last_error=None,
            on_failure={"plate": "failed"},
        )
    },
    "failed": {"failed": {"weighed": True, "plate": "failed"}},
    "function": {"failed": lambda row, error: {"weighed": True, "plate": "failed"}},
    "the key of a group": {"group_by": "plate"},
}
TOLD = {
    name: Unlocked(
        Truck,
        {"pending": Truck.objects.filter(weighed=False), "done": {"weighed": True}, **options},
        Vehicle,
    )
    for name, options in NOTES.items()
}


if HAS_ROW_LOCKS:
    # Keys are refused without the gate.
    CASES = {
        name: case
        for name, case in {**CLAIMS, **TOLD}.items()
        if HAS_GATE or "group_by" not in case.options
    }

    @pytest.mark.parametrize("case", CASES.values(), ids=CASES)
    def test_no_claim_waits_for_a_part_that_another_session_has_locked(case: Unlocked) -> None:
        row: Any = case.model._default_manager.create()

        def handle(row: Any) -> None:
            handled.append(row.pk)
            if "group_by" not in case.options:
                raise ValueError(row.pk)

        handled: list[Any] = []
        run = batch_processor(**case.options)(handle)
        with part_locked(case.parent, row.pk):
            report = the.elsewhere(lambda: run(wait_for_locked=0))
        assert_run(report, skipped=1)
        assert handled == []
        run(wait_for_locked=0)
        assert handled == [row.pk]


if HAS_GATE:

    def test_no_session_moves_a_row_to_another_key_while_it_is_handled() -> None:
        """Its key is in a parent's table, and only the lock shows that the row is at work."""
        row = Truck.objects.create()
        moved: list[int] = []

        def handle(row: Truck) -> None:
            rows = Vehicle.objects.select_for_update(skip_locked=True).filter(pk=row.pk)
            moved.append(the.elsewhere(lambda: len(_locked_rows(rows.using("other")))))

        run = batch_processor(**TOLD["the key of a group"].options)(handle)
        assert_run(run(filter=the.only(row)), processed=1)
        assert moved == [0]
