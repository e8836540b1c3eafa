"""Plays random histories on the database and on the model, and compares the two after each step.

A death is simulated as it looks from the database: from the handler on, no statement is sent any
more, and the connection is closed. (Real processes are killed elsewhere, at chosen statements.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from django.db import connection
from django.db.models import Q
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from dcl_processor import BatchProcessor, Delivery, Discard, Lease, Retry, Snooze, batch_processor
from dcl_processor.clock import DatabaseNow
from dcl_processor.interrupts import Interruption
from dcl_processor.report import COUNTS
from tests.contract.support.errands import elsewhere
from tests.contract.support.histories import DEATHS, MEETINGS, MOST, World
from tests.models import Errand

#: Seconds; long beside a history, which moves the clocks itself.
LONG = 3_600.0

OPTIONS: dict[Delivery, dict[str, Any]] = {
    Delivery.TRANSACTIONAL: {},
    Delivery.AT_MOST_ONCE: {"claim": {"claimed": True}, "claimed_at": "claimed_at"},
    Delivery.AT_LEAST_ONCE: {"lease": Lease(LONG)},
}
RESET = {"done": False, "dead": False, "claimed": False}


class Killed(Interruption):
    """Stands for the death of the process; no handler of errors may catch it."""


RAISED: dict[str, Callable[[], BaseException]] = {
    "fail": lambda: OSError("no answer"),
    "poison": lambda: ValueError("no such address"),
    "snooze": lambda: Snooze("closed", delay=LONG),
    "discard": lambda: Discard("moved away"),
    "interrupt": KeyboardInterrupt,
    "die": Killed,
}

WAYS = ["ok", "ok", "fail", "poison", "snooze", "discard"]


def scripts(*ways: str) -> st.SearchStrategy[dict[int, str]]:
    """Draw what the handler does to each row; rows that come later are handled."""
    each = st.lists(st.sampled_from(ways), min_size=8, max_size=8)
    return each.map(lambda drawn: dict(enumerate(drawn)))


places = st.sets(st.integers(0, 7))


class Histories(RuleBasedStateMachine):
    delivery: Delivery
    is_async = False

    def __init__(self) -> None:
        super().__init__()
        Errand.objects.all().delete()
        self.model = World(self.delivery)
        self.calls: list[int] = []

    @initialize()
    def rows_are_there(self) -> None:
        self.rows_arrive(6)

    @rule(count=st.integers(1, 2))
    def rows_arrive(self, count: int) -> None:
        for _ in range(count):
            row = Errand.objects.create(place=len(self.model.rows))
            self.model.requeue([row.place])

    @rule(script=scripts(*WAYS), size=st.integers(1, 4), concurrency=st.integers(1, 3))
    def run(self, script: dict[int, str], size: int, concurrency: int = 1) -> None:
        self._play(script, size, concurrency if self.is_async else 1)

    @rule(script=scripts("ok", "fail", "ok", *DEATHS), size=st.integers(1, 4))
    def run_and_perhaps_end(self, script: dict[int, str], size: int) -> None:
        # On an event loop a row without attempts is settled before or after the end of another one.
        is_race = self.is_async and any(row.attempts >= MOST for row in self.model.rows.values())
        self._play(script, 1 if is_race else size)

    @rule(
        place=st.integers(0, 5),
        how=st.sampled_from(MEETINGS),
        size=st.integers(1, 3),
        beside=scripts("ok", "fail", "snooze"),
    )
    def run_beside_somebody(
        self, place: int, how: str, size: int, beside: dict[int, str] | None = None
    ) -> None:
        if self.delivery == Delivery.TRANSACTIONAL:
            how = "copy"  # any other session would wait for the row's lock
            if not connection.features.has_select_for_update:
                return  # a copy would wait for the whole database
        if how == "late" and self.delivery == Delivery.AT_MOST_ONCE:
            how = "requeued"  # no time takes a claim away
        if how == "requeued" and self.delivery == Delivery.AT_LEAST_ONCE:
            how = "late"  # what a living lease holds is not put back
        self.model.beside = beside or {}
        self._play({place: how}, size)

    @rule()
    def leases_lapse(self) -> None:
        Errand.objects.exclude(leased_until=None).update(leased_until=DatabaseNow())
        for row in self.model.rows.values():
            row.leased = False

    @rule()
    def time_passes(self) -> None:
        Errand.objects.exclude(next_attempt_at=None).update(next_attempt_at=DatabaseNow())
        for row in self.model.rows.values():
            row.waiting = False

    @rule(places=places)
    def somebody_requeues(self, places: set[int]) -> None:
        rows = self.model.rows
        there = {place for place in places & rows.keys() if not rows[place].leased}
        assert self._processor({}, 1).requeue(
            Errand.objects.filter(place__in=places), force=True
        ) == len(there)
        self.model.requeue(there)

    @rule(places=places)
    def somebody_clears_up(self, places: set[int]) -> None:
        if self.delivery != Delivery.AT_MOST_ONCE:
            return
        processor = self._processor({}, 1)
        doubtful = {place for place, row in self.model.rows.items() if row.claimed}
        rows = processor.in_doubt(older_than=0)
        assert {row.place for row in rows} == doubtful
        there = places & doubtful
        assert processor.mark_done(rows.filter(place__in=places)) == len(there)
        for place in there:
            row = self.model.rows[place]
            row.done, row.claimed, row.attempts = True, False, 0

    @invariant()
    def the_rows_are_as_in_the_model(self) -> None:
        now = DatabaseNow()
        rows = Errand.objects.annotate(
            leased=Q(leased_until__gt=now), waiting=Q(next_attempt_at__gt=now)
        )
        found = {
            row.place: {
                "done": row.done,
                "dead": row.dead,
                "claimed": row.claimed,
                "attempts": row.attempts,
                "leased": bool(row.leased),
                "waiting": bool(row.waiting),
                "worked": row.result == "worked",
            }
            for row in rows
        }
        assert found == {place: vars(row) for place, row in self.model.rows.items()}

    def _play(self, script: dict[int, str], size: int, concurrency: int = 1) -> None:
        self.calls.clear()
        self.model.calls.clear()
        self.model.report.clear()
        lives = self.model.run(script, max(size, concurrency))
        report = None
        try:
            with connection.execute_wrapper(self._sent_by_the_living):
                self.dead = False
                report = self._processor(script, size).run(concurrency=concurrency)
        except (Killed, KeyboardInterrupt):
            connection.close()  # what a dead process's session comes to
        assert (report is not None) == lives
        alone = concurrency == 1 and not {*MEETINGS} & set(script.values())
        # A copy that meets another goes on from a random place.
        order: Callable[[list[int]], Any] = list if alone else Counter
        assert order(self.calls) == order(self.model.calls)
        if report is not None:
            counts = {name: getattr(report, name) for name in COUNTS if name != "stale"}
            assert +Counter(counts) == self.model.report

    def _processor(self, script: dict[int, str], size: int) -> BatchProcessor[Errand]:
        def handle(row: Errand) -> None:
            self.calls.append(row.place)
            _own(row).update(result="worked")
            self._act(script.get(row.place, "ok"), row)

        async def handle_at_once(row: Errand) -> None:
            self.calls.append(row.place)
            await _own(row).aupdate(result="worked")
            self._act(script.get(row.place, "ok"), row)

        return batch_processor(
            pending=lambda: Errand.objects.filter(done=False, dead=False, claimed=False),
            done={"done": True, "claimed": False},
            failed={"dead": True, "claimed": False},
            reset=RESET,
            retry=Retry(MOST, backoff=LONG, max_delay=LONG, jitter=0, give_up_on=ValueError),
            delivery=self.delivery,
            batch_size=size,
            **OPTIONS[self.delivery],
        )(handle_at_once if self.is_async else handle)

    def _act(self, how: str, row: Errand) -> None:
        self.dead = how == "die"
        if how in RAISED:
            error = RAISED[how]()
            raise error
        if how in MEETINGS:
            _elsewhere(lambda: self._meet(how, row))

    def _meet(self, how: str, row: Errand) -> None:
        if how == "requeued":
            self._processor({}, 1).requeue(_own(row), force=True)
            return
        if how == "late":
            _own(row).update(leased_until=DatabaseNow())
        self._processor(dict(self.model.beside), 1).run(wait_for_locked=0)

    def _sent_by_the_living(self, execute: Callable[..., Any], *args: Any) -> Any:
        if self.dead:
            raise Killed
        return execute(*args)


def _own(row: Errand) -> Any:
    return Errand.objects.filter(pk=row.pk)


def _elsewhere(act: Callable[[], None]) -> None:
    try:
        elsewhere(act)
    except BaseException as error:
        # Nothing that the run could take for a failure of the row.
        raise Killed from error


def play(delivery: Delivery, *, is_async: bool = False, **options: Any) -> None:
    """Play histories; raises what the first of them, made as short as it can be, came to."""
    kind = {"delivery": delivery, "is_async": is_async}
    machine = type(f"{delivery.name}Histories", (Histories,), kind)
    run: Any = run_state_machine_as_test  # typed in some of its versions
    chosen = {"stateful_step_count": 12, "deadline": None, "database": None, **options}
    run(machine, settings=settings(suppress_health_check=list(HealthCheck), **chosen))
