"""Random orders of the statements of workers that claim rows of the same keys.

Two or three workers claim, renew and settle rows, statement by statement. Some die, and another
session inserts, moves, locks, finishes or requeues rows meanwhile. An oracle reads the committed
state right before each question, and says which rows may be claimed. In the end one more worker has
to be able to handle what is left, in order.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import psycopg
import pytest
from django.db import connection
from django.db.models import F, Q

from dcl_processor.keys import claim as claim_module
from dcl_processor.keys.claim import Claims
from dcl_processor.keys.turns import Turns
from dcl_processor.keys.window import Reads
from dcl_processor.sql.compiled import Statement
from tests.keyed.sessions import (
    FREE,
    LEASE,
    TABLE,
    WAITED,
    Worker,
    claims_of,
    connect,
    own_table,
    spanning,
)
from tests.models import Call, Depot
from tests.shares import is_whole

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(connection.vendor != "postgresql", reason="advisory locks are PostgreSQL's"),
]

LIMITS: dict[str, dict[str, Any]] = {"group": {}, "order": {"in_order": True}, "two": {"most": 2}}
#: What another session does while the workers claim.
FOREIGN = {
    "nothing": "",
    "insert_first": f"INSERT INTO {TABLE} (id, depot_id, place, status, attempts, last_error)"
    " VALUES (8, 1, 0, 'new', 0, ''); COMMIT",
    "late_commit": f"INSERT INTO {TABLE} (id, depot_id, place, status, attempts, last_error)"
    " VALUES (8, 1, 0, 'new', 0, '')",
    "move_out": f"UPDATE {TABLE} SET depot_id = 2 WHERE id = 1",
    "move_in": f"UPDATE {TABLE} SET depot_id = 1, place = 0 WHERE id = 4",
    "delete_head": f"DELETE FROM {TABLE} WHERE id = 1",
    "finish_head": f"UPDATE {TABLE} SET status = 'done' WHERE id = 1",
    "fail_head": f"UPDATE {TABLE} SET next_attempt_at = now() + interval '1 h' WHERE id = 1",
    "swap": f"UPDATE {TABLE} SET place = 3 - place WHERE id IN (1, 2)",
    "requeue": f"UPDATE {TABLE} SET status = 'new' WHERE id = 7",
    "lock_head": "SELECT 1",
}
#: The rows that it locks for that.
LOCKED = {"move_in": [4], "swap": [1, 2], "lock_head": [1, 4], "requeue": []}
KEYS = {1: 1, 2: 1, 3: 1, 4: 2, 5: 2, 6: None}
WANTED = [[1], [1], [1, 3], [2], [1, 2], [1, 4], [4, 1], [2, 5, 6], [3, 1, 4]]
STEPS = ["begin", "locks", "lock_rows", "ask", "commit"]


class WrongError(Exception):
    """A schedule in which a row was claimed that might not be, or was left."""


@dataclass
class Schedule:
    """One order of steps; everything random comes of its seed."""

    seed: int
    oracle: psycopg.Connection[Any]
    foreign: psycopg.Connection[Any]
    sessions: list[psycopg.Connection[Any]]
    #: Rows in flight: who has them, and the key at their claim.
    flight: dict[int, tuple[Worker, int | None]] = field(default_factory=dict)
    #: Of each worker, the rows that it claimed, and who had them before.
    before: list[tuple[Worker, int, Any]] = field(default_factory=list)
    trace: list[Any] = field(default_factory=list)
    claimed: int = 0
    taken_over: int = 0

    def play(self) -> None:
        self.random = random.Random(self.seed)  # noqa: S311  # no secret
        choose = self.random.choice
        self.delivery = choose(["transactional", "at_least_once", "at_most_once"])
        self.kind, self.pending = choose([*LIMITS]), choose([own_table, spanning])
        self.what = choose([*FOREIGN])
        self.lapses = self.delivery == "at_least_once" and self.random.random() < 0.7
        self.trace += [self.seed, self.delivery, self.kind, self.pending.__name__, self.what]
        self._fill()
        claims = claims_of(self.delivery, **LIMITS[self.kind])
        lease = 0 if self.lapses else 30
        workers = [
            Worker(self.delivery, claims, self.pending, lease, session)
            for session in self.sessions[: 3 if self.kind == "two" else 2]
        ]
        for worker in workers:
            worker.wanted = {pk: KEYS[pk] for pk in choose(WANTED)}
        self.trace.append([[*worker.wanted] for worker in workers])
        self._interleave(workers)
        self.foreign.execute("ROLLBACK")
        for worker in workers:
            if not worker.dead:
                worker.session.execute("ROLLBACK")
        self._drain(Worker(self.delivery, claims, self.pending, 30, self.oracle))

    def _fill(self) -> None:
        self.oracle.execute(f"DELETE FROM {TABLE}")
        rows = [(1, 1, 1), (2, 1, 2), (3, 1, 3), (4, 2, 1), (5, 2, 2), (6, None, 1), (7, 1, 0)]
        Call.objects.bulk_create(
            Call(pk=pk, depot_id=key, place=place, status="done" if pk == 7 else "new")
            for pk, key, place in rows
        )

    def _script(self, worker: Worker) -> list[tuple[Worker | None, str]]:
        renewals = ["renew"] if self.lapses else []
        steps = [*STEPS, *renewals, "settle", *renewals]
        if self.delivery == "transactional":
            steps = ["begin", "locks", "lock_rows", "ask", "settle"]
        if self.random.random() < 0.2:
            steps = [*steps[: self.random.randrange(1, len(steps) + 1)], "die"]
        return [(worker, step) for step in steps]

    def _interleave(self, workers: Sequence[Worker]) -> None:
        scripts = [self._script(worker) for worker in workers]
        scripts.append([(None, "begin"), (None, "end")])
        order = [number for number, script in enumerate(scripts) for _ in script]
        self.random.shuffle(order)
        lines = [iter(script) for script in scripts]
        for number in order:
            worker, step = next(lines[number])
            self.trace.append((number, step))
            if worker is None:
                self._other_session(step)
            elif not worker.dead:
                getattr(self, f"_{step}", lambda each, step=step: getattr(each, step)())(worker)

    def _other_session(self, step: str) -> None:
        session = self.foreign
        if step == "end":
            session.execute("COMMIT")
            return
        session.execute("BEGIN")
        rows = LOCKED.get(self.what, [1] if "head" in self.what or self.what == "move_out" else [])
        if {*rows} & {*self.flight}:
            return
        try:
            session.execute(f"SELECT 1 FROM {TABLE} WHERE id = ANY(%s) FOR UPDATE NOWAIT", [rows])
            session.execute(FOREIGN[self.what] or "SELECT 1")
        except psycopg.errors.LockNotAvailable:
            session.execute("ROLLBACK")

    # --- what the oracle says

    def state(self) -> dict[int, tuple[Any, ...]]:
        rows = self.oracle.execute(
            f"SELECT id, depot_id, place, status, leased_until IS NOT NULL, "
            f"leased_until > clock_timestamp(), claimed_at IS NOT NULL FROM {TABLE}"
        )
        return {row[0]: row for row in rows.fetchall()}

    def _ask(self, worker: Worker) -> None:
        before = self.state()
        got = worker.ask()
        self.trace.append([row[0] for row in got])
        keys = worker.wanted
        for pk, *_ in got:
            self._judge(worker, pk, keys[pk], before)
            self.before.append((worker, pk, self.flight.get(pk)))
            self.flight[pk] = worker, keys[pk]

    def _judge(
        self, worker: Worker, pk: int, key: int | None, before: dict[int, tuple[Any, ...]]
    ) -> None:
        _, its_key, place, status, _, is_leased, _ = before[pk]
        takes_over = pk in self.flight
        if status != "new" or its_key != key:
            self._wrong(f"row {pk} was {status}, of key {its_key}")
        if takes_over and (not self.lapses or is_leased):
            self._wrong(f"row {pk} has two workers")
        self.claimed += not takes_over
        self.taken_over += takes_over
        if takes_over or key is None:
            return
        siblings = [each for each in self.flight if self.flight[each][1] == key and each != pk]
        holders: Any = siblings
        if self.delivery == "transactional":
            # The rows of one transaction are one place.
            holders = {id(self.flight[each][0]) for each in siblings} - {id(worker)}
        if len(holders) >= worker.claims.most:
            self._wrong(f"rows {siblings} of key {key} are in flight beside row {pk}")
        if worker.claims.in_order:
            unfinished = (row for row in before.values() if row[1] == key and row[3] == "new")
            head = min((row[2], row[0]) for row in unfinished)
            if (place, pk) != head:
                self._wrong(f"row {pk} comes before {head}")

    def _wrong(self, why: str) -> None:
        raise WrongError(f"{why}: {self.trace}")

    # --- the ends of rows

    def _settle(self, worker: Worker) -> None:
        for row in worker.got:
            if self.delivery == "transactional":
                worker.settle(row)
            elif self._is_free(row[0]) and worker.settle(row):
                self._expect_owner(worker, row[0])
                del self.flight[row[0]]
        if self.delivery == "transactional":
            worker.commit()
            for row in worker.got:
                del self.flight[row[0]]

    def _renew(self, worker: Worker) -> None:
        for place, row in enumerate(worker.got):
            renewed = worker.renew(row) if self._is_free(row[0]) else None
            if renewed is not None:
                self._expect_owner(worker, row[0])
                worker.got[place] = renewed

    def _expect_owner(self, worker: Worker, pk: int) -> None:
        if self.flight.get(pk, (None,))[0] is not worker:
            self._wrong(f"row {pk} was written by a worker that had lost it")

    def _is_free(self, pk: int) -> bool:
        """Whether a write would not wait: all sessions are in one thread."""
        self.oracle.execute("BEGIN")
        try:
            self.oracle.execute(
                f"SELECT 1 FROM {TABLE} WHERE id = %s FOR NO KEY UPDATE NOWAIT", [pk]
            )
        except psycopg.errors.LockNotAvailable:
            return False
        finally:
            self.oracle.execute("ROLLBACK")
        return True

    def _die(self, worker: Worker) -> None:
        worker.dead = True
        pid = worker.session.info.backend_pid
        worker.session.close()
        while self.oracle.execute(
            "SELECT 1 FROM pg_stat_activity WHERE pid = %s", [pid]
        ).fetchone():
            pass  # its locks are held until its server process has ended
        if not worker.committed:
            # Its transaction is undone: what it took over is the late worker's again.
            for owner, pk, was in self.before:
                if owner is worker:
                    self.flight.pop(pk, None)
                    if was:
                        self.flight[pk] = was
            return
        state, place = self.state(), 4 if self.delivery == "at_least_once" else 6
        for pk in [pk for pk, (owner, _) in self.flight.items() if owner is worker]:
            if pk not in state or not state[pk][place]:
                del self.flight[pk]

    # --- what is left

    def _drain(self, worker: Worker) -> None:
        """Let one more worker handle everything, once marks have lapsed or were cleared."""
        self.oracle.execute(
            f"UPDATE {TABLE} SET leased_until = clock_timestamp() WHERE leased_until IS NOT NULL; "
            f"UPDATE {TABLE} SET status = 'new', claimed_at = NULL WHERE status = 'sending'; "
            f"UPDATE {TABLE} SET next_attempt_at = NULL"
        )
        most, in_order = worker.claims.most, worker.claims.in_order
        reads = Reads("depot_id", in_order, worker.claims.mark, "default")
        due = WAITED & FREE if self.delivery == "at_least_once" else WAITED
        turns = Turns(
            lambda after, tried: reads.read(self.pending(), due, after, tried), most, in_order
        )
        handled: list[tuple[Any, ...]] = []
        while rows := turns.take(1):
            worker.wanted = rows
            for step in ("begin", "locks", "lock_rows", "ask"):
                getattr(worker, step)()
            for row in worker.got:
                worker.settle(row)
                handled.append((row[1], row[2], row[0]))
            worker.session.execute("COMMIT")
            for pk, key in rows.items():
                turns.end(pk, key, done=bool(worker.got))
        self._judge_drain(handled)

    def _judge_drain(self, handled: Sequence[tuple[Any, ...]]) -> None:
        is_spanning, in_order = self.pending is spanning, self.kind == "order"
        left = [row for row in self.state().values() if row[3] == "new"]
        if left := [row for row in left if row[1] is not None or not is_spanning]:
            self._wrong(f"rows {left} are left")
        for key in (1, 2) if in_order else ():
            mine = [each for each in handled if each[0] == key]
            # The first may be a row that was taken over.
            if mine[1:] != sorted(mine[1:]):
                self._wrong(f"rows were handled in the order {handled}")


@pytest.fixture
def explore() -> Iterator[Callable[[Sequence[int]], list[Schedule]]]:
    """Give a function that plays schedules by their seeds."""
    Depot.objects.bulk_create(Depot(pk=number, name=str(number)) for number in (1, 2))
    oracle, foreign = connect(), connect()
    sessions = [connect() for _ in range(3)]

    def play(seeds: Sequence[int]) -> list[Schedule]:
        played = []
        for seed in seeds:
            for place, session in enumerate(sessions):
                sessions[place] = connect() if session.closed else session
            schedule = Schedule(seed, oracle, foreign, sessions)
            try:
                schedule.play()
            finally:
                for session in (oracle, foreign, *sessions):
                    if not session.closed:
                        session.execute("ROLLBACK")
            played.append(schedule)
        return played

    yield play
    for session in (oracle, foreign, *sessions):
        session.close()


def test_no_limit_and_no_order_is_broken_in_any_schedule(
    explore: Callable[[Sequence[int]], list[Schedule]],
) -> None:
    played = explore(range(4_000 if is_whole() else 250))
    assert sum(each.claimed for each in played) > 250
    assert sum(each.taken_over for each in played) > 0


# --- faults that the schedules have to find


def _no_lock_of_keys(patch: pytest.MonkeyPatch) -> None:
    got = Statement("SELECT set_config('dcl.keys', '{1,2,3,4,5}', true)")
    patch.setattr(Claims, "lock_keys", lambda *_: got)


def _key_not_asked_again(patch: pytest.MonkeyPatch) -> None:
    real = Claims.lock_rows
    asked = 't."depot_id" IS NOT DISTINCT FROM w.key'

    def lock_rows(claims: Claims, candidates: Mapping[Any, Any]) -> Statement:
        sql, params = real(claims, candidates)
        assert asked in sql
        return Statement(sql.replace(asked, "true"), params)

    patch.setattr(Claims, "lock_rows", lock_rows)


def _marks_not_asked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Claims, "_has_place", lambda *_: Q(pk__isnull=False))


def _order_not_asked(patch: pytest.MonkeyPatch) -> None:
    real = Claims._free
    patch.setattr(
        Claims, "_free", lambda claims, *rest: real(replace(claims, in_order=False), *rest)
    )


def _lapsed_siblings_pass(patch: pytest.MonkeyPatch) -> None:
    real = Claims._has_place
    alive = replace(LEASE, in_flight=LEASE.in_flight & ~(LEASE.lapsed or Q()))

    def has_place(claims: Claims, *rest: Any) -> Q:
        leased = claims.mark is not None and claims.mark.lapsed is not None
        return real(replace(claims, mark=alive) if leased else claims, *rest)

    patch.setattr(Claims, "_has_place", has_place)


def _takeover_asks_order(patch: pytest.MonkeyPatch) -> None:
    def condition(claims: Claims, pending: Any, pks: Any = ()) -> Q:
        ours = Q(claim_module._Locked(F("pk"), type=claims._type("pk")))
        return ours & claims._free(pending, ours)

    patch.setattr(Claims, "condition", condition)


FAULTS = [
    _no_lock_of_keys,
    _key_not_asked_again,
    _marks_not_asked,
    _order_not_asked,
    _lapsed_siblings_pass,
    _takeover_asks_order,
]


@pytest.mark.parametrize("fault", FAULTS, ids=[each.__name__.strip("_") for each in FAULTS])
def test_the_schedules_find(
    fault: Callable[[pytest.MonkeyPatch], None],
    explore: Callable[[Sequence[int]], list[Schedule]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault(monkeypatch)
    with pytest.raises(WrongError):
        explore(range(2_000))
