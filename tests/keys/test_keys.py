"""Random runs over keys, in spite of trouble, and a judge that computes what is right on its own.

A seed selects the delivery, the mode of the keys, what the handlers do and how long they take, how
many workers there are, and what other sessions do meanwhile. Afterwards one more run, without
trouble, handles what is left. ``SEEDS=900`` plays more (``make keys``), and ``SEEDS=17:18`` one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import pairwise
from threading import Event, Semaphore
from typing import Any

import pytest
from django.db import connection, transaction
from django.db.models import Q
from django.utils import timezone

from dcl_processor import (
    BatchProcessor,
    Delivery,
    Discard,
    Lease,
    Report,
    Retry,
    Snooze,
    batch_processor,
)
from tests.contract.support.errands import PENDING, meanwhile
from tests.models import Errand
from tests.waiting import PATIENCE

BEGIN, _, END = os.environ.get("SEEDS", "60").rpartition(":")
SEEDS = range(int(BEGIN or 0), int(END))

pytestmark = [
    pytest.mark.skipif(connection.vendor != "postgresql", reason="elsewhere keys have other locks"),
    pytest.mark.django_db(transaction=True),
    *([pytest.mark.timeout(0)] if "SEEDS" in os.environ else []),
]

#: How the rows of a key are handled, and how many of them may be in flight; 0: any number.
MODES: dict[str, tuple[dict[str, Any], int]] = {
    "plain": ({}, 0),
    "by key": ({"group_by": "place"}, 1),
    "in order": ({"group_by": "place", "in_order": True}, 1),
    "two at once": ({"group_by": "place", "max_per_group": 2}, 2),
    "three at once": ({"group_by": "place", "max_per_group": 3}, 3),
}
DELIVERIES: dict[str, dict[str, Any]] = {
    "transactional": {},
    "at most once": {
        "delivery": Delivery.AT_MOST_ONCE,
        "claim": {"claimed": True},
        "claimed_at": "claimed_at",
        "done": {"done": True, "claimed": False},
        "reset": {"claimed": False},
    },
    "at least once": {"delivery": Delivery.AT_LEAST_ONCE, "lease": Lease(60)},
}
RETRIES = {
    "none": None,
    "at once": Retry(2, backoff=0, jitter=0),
    "late": Retry(2, backoff=600, jitter=0),
}
TROUBLES = ["lease", "short lease", "lapsed lease", "doubt", "row lock", "key lock", "move"]


@dataclass
class Call:
    """A call of the handler."""

    run: str
    row: int
    key: int
    begin: float
    outcome: str
    seconds: float
    end: float = 0.0


@dataclass
class Phase:
    """Workers that run at the same time; ``stop_after``: seconds."""

    workers: Sequence[str]
    limit: int | None = None
    wait: float = 0
    stop_after: float | None = None
    has_trouble: bool = False
    reports: dict[str, Report] = field(default_factory=dict, repr=False)
    #: The rows as the workers leave them.
    rows: dict[int, Errand] = field(default_factory=dict, repr=False)


class World:
    """What a seed selects, and the calls that came of it."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        dice = self.dice = random.Random(seed)  # noqa: S311  # no secret
        self.delivery = dice.choice([*DELIVERIES, "at least once"])
        self.mode = dice.choice([*MODES])
        self.is_async = self.delivery != "transactional" and dice.random() < 0.55
        several = [1, 3, 6, 8] if self.is_async else [1, 2, 3, 6]
        self.concurrency = dice.choice([1] if self.delivery == "transactional" else several)
        self.batch_size = dice.choice([1, 1, 1, 2, 3, 5]) if self.mode != "in order" else 1
        self.retry = dice.choice(["none", "at once", "at once", "late"])
        self.has_failed = dice.random() < 0.6
        most = dice.choice([None] * 9 + [2])
        # It is refused with keys, and with AT_MOST_ONCE.
        has_places = self.mode == "plain" and self.delivery != "at most once"
        self.max_in_flight = most if has_places else None
        self.errors = dice.choice([0, 0.2, 0.4])
        self.slowest = dice.choice([0.002, 0.01, 0.05])
        number, keys = dice.choice([5, 12, 25, 40]), dice.choice([1, 2, 4, 8])
        hot = dice.choice([0, 0.6])
        self.keys = [0 if dice.random() < hot else dice.randrange(keys) for _ in range(number)]
        self.troubles = dice.sample(TROUBLES, dice.randint(0, 3))
        self.first = Phase(
            workers=["a", "b"][: dice.choice([1, 1, 2])],
            limit=dice.choice([None, None, None, dice.randint(1, number)]),
            wait=dice.choice([0, 0, 0.3, 3]),
            stop_after=dice.choice([None] * 6 + [dice.uniform(0, 0.08)]),
            has_trouble=True,
        )
        self.calls: list[Call] = []
        #: Rows with the marks of others, those that they keep, and keys for which trouble is made.
        self.marked: set[int] = set()
        self.held: set[int] = set()
        #: Rows that a worker had once, in their turn: they are taken over at once.
        self.lapsed: set[int] = set()
        self.troubled: set[int] = set()
        self.faults: list[str] = []
        self._lock = threading.Lock()

    def play(self) -> list[str]:
        """Return what is wrong."""
        Errand.objects.all().delete()
        Errand.objects.bulk_create([Errand(place=key) for key in self.keys])
        self.rows = list(Errand.objects.order_by("pk"))
        self._run(self.first)
        if not self.faults:
            marked = Errand.objects.filter(pk__in=self.marked, done=False, dead=False)
            marked.update(leased_until=None, claimed=False, claimed_at=None)
            self.marked.clear()
            self.held.clear()
            self._run(Phase(["c"]))
        return self.faults

    # --- the workers

    def _run(self, phase: Phase) -> None:
        is_over, stop = Event(), Event()
        trouble = self._trouble(is_over) if phase.has_trouble else ()
        with ExitStack() as others:
            results = [others.enter_context(meanwhile(act)) for act in trouble]
            others.callback(is_over.set)
            with ExitStack() as workers:
                runs = [partial(self._work, name, phase, stop) for name in phase.workers]
                reports = [workers.enter_context(meanwhile(run)) for run in runs]
                if phase.stop_after is not None:
                    time.sleep(phase.stop_after)
                    stop.set()
            phase.rows = {row.pk: row for row in Errand.objects.all()}
        ended = [each for some in (*results, *reports) for each in some]
        self.faults += [repr(each) for each in ended if isinstance(each, BaseException)]
        phase.reports = {name: each for name, [each] in zip(phase.workers, reports, strict=True)}
        if not self.faults:
            self.faults += Judge(self, phase).faults()

    def _work(self, name: str, phase: Phase, stop: Event) -> Report:
        return self.processor(name)(
            concurrency=self.concurrency, limit=phase.limit, wait_for_locked=phase.wait, stop=stop
        )

    # --- the handlers

    def processor(self, run: str) -> BatchProcessor[Errand]:
        options: dict[str, Any] = {
            "name": "tests.keys",
            "done": {"done": True},
            "batch_size": self.batch_size,
            "max_in_flight": self.max_in_flight,
            "retry": RETRIES[self.retry],
            **DELIVERIES[self.delivery],
            **MODES[self.mode][0],
        }
        if self.has_failed:
            options["failed"] = {"dead": True, "claimed": False}

        # An exception that is returned counts as one that is raised.
        def handle(row: Errand) -> Any:
            call = self._begin(run, row)
            time.sleep(call.seconds)
            return self._end(call)

        async def handle_async(row: Errand) -> Any:
            call = self._begin(run, row)
            await asyncio.sleep(call.seconds)
            return self._end(call)

        handler: Callable[..., Any] = handle_async if self.is_async else handle
        return batch_processor(pending=PENDING.order_by("pk"), **options)(handler)

    def _begin(self, run: str, row: Errand) -> Call:
        with self._lock:
            before = sum(call.row == row.pk for call in self.calls)
            # By the row's place and its calls, whatever the threads do.
            at = row.pk - self.rows[0].pk
            dice = random.Random(f"{self.seed} {at} {before}")  # noqa: S311  # no secret
            outcome = "processed"
            if dice.random() < self.errors:
                others = ["failed", "failed", "snoozed", "discarded"]
                outcome = dice.choice(others if self.has_failed else others[:3])
            seconds = dice.uniform(0, self.slowest)
            call = Call(run, row.pk, row.place, time.monotonic(), outcome, seconds)
            self.calls.append(call)
            return call

    def _end(self, call: Call) -> Exception | None:
        """Return what becomes of the row."""
        call.end = time.monotonic()
        delay = 600 if self.retry != "none" and call.row % 2 else None
        errors = {
            "processed": None,
            "failed": ValueError("no"),
            "snoozed": Snooze(delay=delay),
            "discarded": Discard("no"),
        }
        return errors[call.outcome]

    # --- what others do meanwhile

    def _trouble(self, is_over: Event) -> Iterator[Callable[[], object]]:
        """Do what is there from the start; yield the rest, which has begun when it is ready."""
        ready = Semaphore(0)
        for trouble in self.troubles:
            rows = self.dice.sample(self.rows, min(self.dice.randint(1, 4), len(self.rows)))
            seconds = self.dice.choice([0.02, 0.1, 0.4, 5])
            mine = Errand.objects.filter(pk__in=[row.pk for row in rows])
            if "lease" in trouble and self.delivery == "at least once":
                ends = {"lease": 3600, "short lease": self.dice.uniform(0.02, 0.3)}
                until = timezone.now() + timedelta(seconds=ends.get(trouble, -5))
                mine.update(leased_until=until)
                if trouble == "lapsed lease":
                    self.lapsed |= {row.pk for row in rows}
                self._mark(rows, are_held=trouble == "lease")
            elif trouble == "doubt" and self.delivery == "at most once":
                mine.update(claimed=True, claimed_at=timezone.now())
                self._mark(rows, are_held=True)
            elif trouble == "row lock":
                self._touch(rows)
                locking = mine.order_by("pk").select_for_update(no_key=True)
                yield partial(self._hold, partial(list, locking), ready, is_over, seconds)
                ready.acquire(timeout=PATIENCE)
            elif trouble == "key lock" and self.mode != "plain":
                self._touch(rows[:1])
                lock = partial(self.processor("locker").lock_key, rows[0].place)
                yield partial(self._hold, lock, ready, is_over, seconds)
                ready.acquire(timeout=PATIENCE)
            elif trouble == "move":
                moves = [(row, self.dice.choice(self.keys)) for row in rows]
                self._touch(rows)
                self.troubled |= {key for _, key in moves}
                yield partial(self._move, moves, is_over)

    def _touch(self, rows: Sequence[Errand]) -> None:
        self.troubled |= {row.place for row in rows}

    def _mark(self, rows: Sequence[Errand], *, are_held: bool) -> None:
        self._touch(rows)
        self.marked |= {row.pk for row in rows}
        self.held |= {row.pk for row in rows if are_held}

    @staticmethod
    def _hold(lock: Callable[[], object], ready: Semaphore, is_over: Event, seconds: float) -> None:
        with transaction.atomic():
            lock()
            ready.release()
            is_over.wait(seconds)

    @staticmethod
    def _move(moves: list[tuple[Errand, int]], is_over: Event) -> None:
        """Move rows that wait to another key, or delete them."""
        for row, key in moves:
            idle = Q(done=False, dead=False, claimed=False, leased_until=None)
            waits = Errand.objects.filter(idle, pk=row.pk)
            if row.pk % 3:
                waits.update(place=key)
            else:
                waits.delete()
            if is_over.wait(0.01):
                return


class Judge:
    """Says what is wrong with the calls and the rows at the end of a phase."""

    def __init__(self, world: World, phase: Phase) -> None:
        self.world, self.phase = world, phase
        self.most = MODES[world.mode][1]
        self.retries = world.retry != "none"
        self.moves = "move" in world.troubles
        self.mine = [call for call in world.calls if call.run in phase.workers]
        self.by_row: defaultdict[int, list[Call]] = defaultdict(list)
        for call in world.calls:
            self.by_row[call.row].append(call)

    def faults(self) -> list[str]:
        found = [
            *self.reported(),
            *self.repeated(),
            *self.in_flight(),
            *self.overtaken(),
            *self.written(),
            *self.left(),
        ]
        return [f"workers {self.phase.workers}: {fault}" for fault in found]

    def is_settled(self, call: Call) -> bool:
        gives_up = not self.retries and self.world.has_failed
        return (
            call.outcome == "processed"
            or (call.outcome == "discarded" and self.world.has_failed)
            or (call.outcome == "failed" and gives_up)
        )

    def reported(self) -> Iterator[str]:
        for name, report in self.phase.reports.items():
            calls = [call for call in self.mine if call.run == name]
            last = {call.row: call for call in calls}
            times = max(Counter(call.row for call in calls).values(), default=0)
            if times > 1:
                yield f"a row was handled {times} times in one run"
            counted = Counter(call.outcome for call in last.values())
            names = ("processed", "failed", "snoozed", "discarded")
            if any(getattr(report, each) != counted[each] for each in names):
                yield f"{report}, got {counted}"
            if report.lease_lost:
                yield f"{report}, and no lease was taken"
            limit = self.phase.limit
            if limit is not None and len(last) > limit:
                yield f"{len(last)} rows of {limit}"
            if report.stopped == "limit" and len(last) < (limit or 0):
                yield f"{len(last)} rows were taken for {limit}"

    def repeated(self) -> Iterator[str]:
        for row, calls in self.by_row.items():
            for before, after in pairwise(calls):
                if after.begin < before.end:
                    yield f"row {row} was handled by two at once"
                elif self.is_settled(before):
                    yield f"row {row} was handled again after it was {before.outcome}"

    def in_flight(self) -> Iterator[str]:
        spans: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
        for call in self.mine:
            spans[call.key].append((call.begin, call.end))
        for key, theirs in spans.items():
            held = sum(row.place == key for row in self.world.rows if row.pk in self.world.held)
            moments = [(at, 1) for at, _ in theirs] + [(at, -1) for _, at in theirs]
            number = highest = held
            for _, change in sorted(moments):  # at the same time, an end comes first
                number += change
                highest = max(highest, number)
            if highest > self.most > 0:
                yield f"{highest} rows of key {key} were in flight, of {self.most}"

    def overtaken(self) -> Iterator[str]:
        if self.world.mode != "in order" or self.moves:
            return
        for call in self.mine:
            if call.row in self.world.lapsed:
                continue
            for row in self.world.rows:
                before = [each for each in self.by_row[row.pk] if each.end <= call.begin]
                is_used_up = self.retries and sum(x.outcome == "failed" for x in before) >= 2
                is_over = is_used_up or any(map(self.is_settled, before))
                if row.place == call.key and row.pk < call.row and not is_over:
                    yield f"row {call.row} was handled before row {row.pk}"

    def written(self) -> Iterator[str]:
        for pk, row in self.phase.rows.items():
            outcomes = [call.outcome for call in self.by_row[pk]]
            was_processed = "processed" in outcomes
            if row.done != was_processed:
                yield f"row {pk} is done: {row.done}, after {outcomes}"
            if self._is_leased(row) and pk not in self.world.marked:
                yield f"row {pk} is still leased"
            may_be_claimed = pk in self.world.marked or outcomes[-1:] in (["failed"], ["discarded"])
            if row.claimed and not may_be_claimed:
                yield f"row {pk} is still claimed, after {outcomes}"
            may_tell = self.retries and not (row.done or row.dead)
            attempts = outcomes.count("failed")
            if may_tell and "discarded" not in outcomes and row.attempts != attempts:
                yield f"row {pk} has {row.attempts} attempts, after {outcomes}"

    def left(self) -> Iterator[str]:
        """Look for rows that a run without limit or stop has left, and could have handled."""
        reports = [*self.phase.reports.values()]
        if any(report.stopped != "drained" for report in reports):
            return
        left: defaultdict[int, list[int]] = defaultdict(list)
        handled = {call.row for call in self.mine}
        for row in self.phase.rows.values():
            if row.pk not in handled and self._could_be_handled(row):
                left[row.place].append(row.pk)
        for key in {*left} - (self.world.troubled if self.phase.has_trouble else set()):
            rows = [row for row in self.phase.rows.values() if row.place == key]
            if not self._is_blocked(rows, min(left[key])):
                yield f"rows {left[key]} of key {key} are left: {[*map(str, reports)]}"
        changes = {*self.world.troubles} & {"move", "short lease", "row lock", "key lock"}
        if len(reports) == 1 and not (self.phase.has_trouble and changes):
            number = sum(map(len, left.values()))
            if number != reports[0].held + reports[0].skipped:
                yield f"{reports[0]}, and {number} rows are left"

    def _could_be_handled(self, row: Errand) -> bool:
        waits = row.next_attempt_at is not None and row.next_attempt_at > timezone.now()
        is_free = not (row.done or row.dead or row.claimed or self._is_leased(row))
        return is_free and not (self.retries and (waits or row.attempts >= 2))

    @staticmethod
    def _is_leased(row: Errand) -> bool:
        return row.leased_until is not None and row.leased_until > timezone.now()

    def _is_blocked(self, rows: list[Errand], first: int) -> bool:
        if self.world.mode == "in order":
            return any(row.pk < first and not (row.done or row.dead) for row in rows)
        return bool(self.most) and sum(row.claimed for row in rows) >= self.most


def test_every_delivery_and_mode_keeps_to_the_keys_in_spite_of_trouble(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL, "dcl_processor")  # thousands of failures
    met = set[tuple[str, str]]()
    for seed in SEEDS:
        world = World(seed)
        faults = world.play()
        assert not faults, "\n".join(
            [f"SEEDS={seed}:{seed + 1}: {world.delivery}, {world.mode}, {world.troubles}", *faults]
        )
        met.add((world.delivery, world.mode))
    assert "SEEDS" in os.environ or len(met) == len(DELIVERIES) * len(MODES)
