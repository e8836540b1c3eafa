"""Actors: threads with connections of their own that move on command.

An actor comes to a point before each of its steps, says what the step is, and waits. So one
moves at a time, and what the others see of it is decided by the order of the moves alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Any

from django.db import DEFAULT_DB_ALIAS, connection, connections

from dcl_processor.sql.isolation import in_transaction

from .control import Control
from .steps import (
    COMMIT,
    DEATH,
    HANDLER,
    KEY_LOCK,
    ROLLBACK,
    Step,
    Thing,
    describe,
    lockable,
    with_gate,
)

#: How often a statement comes to its gate is for its plan to say, and the next schedule has to
#: find the same plan, though the tables have grown since: by the key, in its order.
ONE_PLAN = "".join(
    f"; SET enable_{way} = off"
    for way in ("seqscan", "bitmapscan", "hashjoin", "mergejoin", "sort")
)
SET_UP = (
    "SET synchronous_commit = off; SET jit = off; SET search_path = explorer, pg_catalog, public"
    + ONE_PLAN
)


#: Added to a row's key where what is meant is its second stage.
STAGE = 100


def _always() -> bool:
    return True


class Died(KeyboardInterrupt):
    """Ends the run of an actor whose process is gone: nothing of it reaches the database."""


class Actor:
    """One thread.

    ``step``: what it is about to do, ``None`` at its end; ``result``, ``error``: how it ended.
    """

    def __init__(
        self,
        number: int,
        name: str,
        control: Control,
        came: SimpleQueue[Actor],
        of: int | None = None,
    ) -> None:
        self.number, self.name = number, name
        self.rows: frozenset[int] = frozenset()
        self.every_statement = False
        #: How often it beats in a run, if it is a heart.
        self.beats = 1
        #: Whether it is in a handler that waits for locks.
        self.may_wait = False
        #: Whether its process is gone.
        self.is_dead = False
        #: The number of the copy whose heart this is.
        self.of = number if of is None else of
        self.memory = f"memory of {self.of}"
        self.has_ended = True
        self.ready: Callable[[], bool] = _always
        self.watched = False
        self.step: Step | None = None
        self.result: Any = None
        self.error: BaseException | None = None
        self.pid = 0
        self._control, self._came = control, came
        self._gate: int | None = None
        self._next: Step | None = None
        self._locked: set[Thing] = set()
        self._jobs: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._go: SimpleQueue[Any] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    # --- for the scheduler

    def begin(self, job: Callable[[], Any], *, watched: bool) -> None:
        """Begin; a watched one stops at its first step."""
        self.watched, self.result, self.error, self.step = watched, None, None, None
        self.has_ended, self._gate = False, None
        self.forget_locks()
        self._jobs.put(job)

    def move(self, answer: Any = None) -> None:
        """Take the step that it is about to take."""
        if self._gate is not None:
            visit, self._gate = self._gate, None
            self._control.open_gate(visit)
        else:
            self._go.put(answer)

    def has_locked(self, row: int) -> bool:
        """Return whether its transaction may have the row's lock."""
        return any(each == row for _, each in self._locked)

    def forget_locks(self) -> None:
        self._locked.clear()

    def let_go(self) -> None:
        """Let it run to the end of its job, past all steps: an error has ended the schedule."""
        self.watched = False
        self.move()

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()

    # --- in its own thread

    def point(self, step: Step, ready: Callable[[], bool] = _always) -> Any:
        """Come to a step, and wait until it may be taken; not before it is ``ready``."""
        if not self.watched or not (step.is_shared or self.every_statement):
            return None
        self._look()
        self.step, self.ready = self._its(step), ready
        self._came.put(self)
        answer = self._go.get()
        self._look()
        return answer

    def _look(self) -> None:
        if self.is_dead:
            raise Died

    def _its(self, step: Step) -> Step:
        # Between the steps of a heart it looks at, and changes, what it shares with its copy.
        return replace(step, writes=step.writes | {self.memory}) if self.is_heart else step

    @property
    def is_heart(self) -> bool:
        return self.of != self.number

    def handle(self, row: int, stage: int = 0) -> None:
        """Be called as the handler of a row, in the second stage perhaps."""
        self.point(replace(HANDLER, rows=frozenset([row, row + stage * STAGE])))

    def _serve(self) -> None:
        _here.actor = self
        try:
            self._connect()
            while (job := self._jobs.get()) is not None:
                if self.is_dead:
                    self._live_again()
                try:
                    self.result = job()
                except BaseException as error:  # noqa: BLE001  # the scheduler's to judge
                    self.error = error
                self.step, self.has_ended = None, True
                self._came.put(self)
        finally:
            connections.close_all()

    def _live_again(self) -> None:
        if (driver := connection.connection) is not None:
            driver.close()
        del connections[DEFAULT_DB_ALIAS]
        self._connect()
        self.is_dead = False

    def _connect(self) -> None:
        wrapper: Any = connection
        wrapper.ensure_connection()
        driver = wrapper.connection
        driver.execute(SET_UP)
        self.pid = driver.info.backend_pid
        driver.add_notice_handler(self._at_gate)
        wrapper.execute_wrappers.append(self._statement)
        wrapper._commit = self._ending(wrapper._commit, COMMIT)
        wrapper._rollback = self._ending(wrapper._rollback, ROLLBACK)

    def _statement(self, execute: Callable[..., Any], sql: str, params: Any, *rest: Any) -> Any:
        self._look()
        if not self.watched:
            return execute(sql, params, *rest)
        # A message without a BEGIN is a transaction that Django does not know.
        inside = connection.in_atomic_block or bool(in_transaction(connection))
        if sql.startswith("COMMIT"):
            # The handler's own, which Django takes for any other statement.
            return self._ending(partial(execute, sql, params, *rest), COMMIT)()
        if sql == "ROLLBACK":
            return self._ending(partial(execute, sql, params, *rest), ROLLBACK)()
        step = describe(
            sql,
            params,
            rows=self.rows,
            locked=self._locked,
            transaction=inside,
            savepoint=bool(connection.savepoint_ids),
        )
        if step.gate is not None and (self.may_wait or self.is_heart):
            step = replace(step, gate=replace(step.gate, may_wait=True))
        self.point(step)
        if step.name == KEY_LOCK.name:
            # What ends the transaction lets go of the key.
            self._locked |= {(KEY_LOCK.name, row) for row in step.rows}
        elif step.gate is not None and inside:
            self._locked |= lockable(sql, step.rows)
        if step.gate is not None and self.watched:
            self._next = step.gate
            sql = with_gate(sql)
        try:
            return execute(sql, params, *rest)
        finally:
            self._look()

    def _at_gate(self, notice: Any) -> None:
        # Called inside the driver while the statement waits in the server.
        word, _, visit = (notice.message_primary or "").partition(" ")
        if word != "gate":
            return
        assert self._next is not None
        self._gate, self.step, self.ready = int(visit), self._its(self._next), _always
        self._came.put(self)

    def _ending(self, end: Callable[[], Any], step: Step) -> Callable[[], Any]:
        def ended() -> Any:
            self._look()
            # One that has locked nothing changes nothing.
            rows = frozenset(row for _, row in self._locked)
            self.point(replace(step, rows=rows, is_shared=bool(rows)))
            result = end()
            self.forget_locks()
            return result

        return ended


def die(control: Control, victims: Sequence[Actor]) -> None:
    """Be the job of an actor: end the process of others, its sessions included."""
    memory = {victims[0].memory}
    here().point(replace(DEATH, rows=victims[0].rows, writes=DEATH.writes | memory))
    victims = [each for each in victims if here().watched and not each.has_ended]
    for each in victims:
        each.is_dead = True
    for each in victims:
        control.end(each.pid)
        each.forget_locks()


class _Here(threading.local):
    actor: Actor | None = None


_here = _Here()


def here() -> Actor:
    """Return the actor whose thread this is."""
    assert _here.actor is not None
    return _here.actor


@contextmanager
def cast_of(
    names: Sequence[str], control: Control, hearts: Sequence[int] = ()
) -> Iterator[tuple[list[Actor], SimpleQueue[Actor]]]:
    """Have an actor of each name, and the queue in which they come to their points.

    ``hearts``: the numbers of those that get a heart, behind all others.
    """
    came: SimpleQueue[Actor] = SimpleQueue()
    actors: list[Actor] = []
    try:
        actors += [Actor(number, name, control, came) for number, name in enumerate(names)]
        for of in hearts:
            actors.append(Actor(len(actors), f"heart of {names[of]}", control, came, of))
        yield actors, came
    finally:
        # All of them first, because one may wait for a lock of another.
        for actor in actors:
            actor.let_go()
        for actor in actors:
            actor.close()
