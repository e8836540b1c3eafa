"""Workers that race in lock-step: a mistake shows each time and not once a month."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from typing import Any

from django.db import connections
from django.db.models import Q

from dcl_processor.exceptions import Unsupported
from dcl_processor.operator.backlog import question_of
from dcl_processor.pending import steady as time
from dcl_processor.processor import BatchProcessor
from dcl_processor.report.interrupts import Interruption
from dcl_processor.report.report import COUNTS, Report
from dcl_processor.report.values import expect_whole_number
from dcl_processor.signals import row_finished
from dcl_processor.sql.isolation import from_test_case, refuse_outer_transaction

from .settling import HandlerAsserted, asserting, raise_asserted, watched

#: Seconds in which the workers have to end after the race was called off.
END_WITHIN = 30.0

#: The most steps that one worker takes in a part of the opening.
MOST = 200

_TABLE = re.compile(r'\b(?:FROM|UPDATE|INTO)\s+["`]?([\w.]+)', re.IGNORECASE)
_LOCKS = re.compile(r" FOR (?:NO KEY )?UPDATE")


class Kind(Enum):
    """The kind of step that a worker stands before; the schedule's opening depends on it."""

    READ = "reads without a lock"
    STATEMENT = "sends any other statement"
    STARTS = "calls the handler"
    RETURNS = "has the handler's result, and has not settled the row"
    SETTLED = "knows the row's outcome"
    WAITS = "waits for rows that others have locked"


@dataclass(frozen=True, slots=True)
class Race:
    """The result of a race.

    ``reports``: one report per worker, in the order of their numbers. ``handled``: for each
    key, the numbers of the workers whose handler was called, in the order of the calls; a row that
    fails may have several. ``trace``: the steps, with one column per worker.
    """

    reports: Sequence[Report]
    handled: Mapping[Any, Sequence[int]]
    trace: str = field(repr=False)

    @property
    def processed(self) -> int:
        """The number of rows that all workers processed."""
        return sum(report.processed for report in self.reports)

    def raise_for_failures(self) -> Race:
        """Return the race, or raise ``RowsFailed`` for the first worker in which a row failed."""
        for report in self.reports:
            report.raise_for_failures()
        return self


def race(
    processor: BatchProcessor[Any],
    *,
    workers: int = 4,
    seed: int = 0,
    filter: Q | None = None,
    using: str | None = None,
    wait_for_locked: float | timedelta = 10,
    timeout: float = 60,
) -> Race:
    """Run workers against each other in lock-step; no worker may handle another's row again.

    ``workers``: the number of workers. Each worker is a thread with its own connections, and one
    moves at a time: from statement to statement, into its handler and out of it. All workers read
    their candidates first. Then the first worker handles a row, the second comes to the same row
    while it is locked, and the last one when it is finished. From then on the turns are random, by
    ``seed``.

    ``filter``, ``using`` and ``wait_for_locked`` are those of ``run()``; ``timeout``: seconds for
    the whole race. Returns a ``Race``. Raises ``AssertionError`` with a trace as soon as a handler
    is about to be called for a row that another worker has or had. A handler's ``AssertionError``,
    and any error of ``run()``, is raised unchanged. Raises ``Unsupported`` inside ``TestCase`` and
    on a database without row locks, where a race would prove nothing.

    Steps are statements, as in the lock-step tests of databases themselves (PostgreSQL's isolation
    tester); a race cannot control what happens inside a statement.
    """
    expect_whole_number("expected workers", workers, of="workers", least=2)
    question = question_of(processor, using, processor._due)
    what = f"race({processor.name})"
    _refuse_where_nothing_is_tested(question.using, what)
    refuse_outer_transaction(question.using, what)
    parameters = {"filter": filter, "using": using, "wait_for_locked": wait_for_locked}
    course = _Course(processor, workers, seed, question.using, timeout)
    return course.run(parameters)


def _refuse_where_nothing_is_tested(using: str, what: str) -> None:
    """Raise ``Unsupported`` unless other sessions see the rows, and can lock them one by one."""
    connection = connections[using]
    if not connection.features.has_select_for_update:
        raise Unsupported(
            f"{what}: expected a database that locks single rows, such as PostgreSQL or MariaDB, "
            f"got {connection.display_name}, which has one lock for all rows, so the test would "
            "test nothing; run it on the database system of production."
        )
    if any(from_test_case(block) for block in connection.atomic_blocks):
        raise Unsupported(
            f"{what}: expected rows that are committed, got a test inside TestCase, whose rows no "
            "other session sees, so it would test nothing; use TransactionTestCase, or "
            "pytest-django's django_db(transaction=True)."
        )


class _Double(Interruption):
    """Ends a worker that was about to handle another worker's row again."""


class _Stop(threading.Event):
    """A run waits for locked rows in its stop's ``wait()``, which is a step of the race here."""

    def __init__(self, step: Callable[[], None]) -> None:
        super().__init__()
        self._step = step

    def wait(self, timeout: float | None = None) -> bool:
        self._step()
        # Other workers move during the step; this short wait is for lock holders outside the race.
        return super().wait(None if timeout is None else min(timeout, 0.01))


class _Worker:
    """One worker that runs the processor, in its own thread."""

    def __init__(self, number: int, course: _Course) -> None:
        self.number = number
        self._course = course
        self.twin = watched(course.processor, self._handling)
        self.stop = _Stop(lambda: self.step(Kind.WAITS, "waits for locked rows"))
        self.report: Report | None = None
        self.error: BaseException | None = None

    def run(self, parameters: Mapping[str, Any]) -> None:
        try:
            with ExitStack() as watching:
                # A new connection's own statements are no part of the race.
                connections[self._course.using].ensure_connection()
                for alias in connections:
                    watching.enter_context(connections[alias].execute_wrapper(self._statement))
                self.report = self.twin.run(**parameters, stop=self.stop)
        except BaseException as error:  # noqa: BLE001  # raised in the test's own thread
            self.error = error.error if isinstance(error, HandlerAsserted) else error
            self._course.call_off()
        finally:
            connections.close_all()
            self._course.turns.ended(self.number)

    def step(self, kind: Kind, what: str) -> None:
        self._course.turns.step(self.number, kind, what)

    def _statement(self, execute: Callable[..., Any], sql: str, params: Any, *more: Any) -> Any:
        reads = sql.lstrip(" (").upper().startswith("SELECT") and not _LOCKS.search(sql)
        self.step(Kind.READ if reads else Kind.STATEMENT, _summary(sql, params))
        return execute(sql, params, *more)

    @contextmanager
    def _handling(self, pks: Sequence[Any]) -> Iterator[None]:
        rows = f"row {', '.join(map(str, pks))}"
        self.step(Kind.STARTS, f"handler({rows})")
        for pk in pks:
            # Before the handler: the test does not need the effect of a second call.
            self._course.refuse_double(pk, self.number)
        try:
            with asserting():
                yield
        except BaseException as error:
            for pk in pks:
                self._course.let_go(pk, self.number)
            self.step(Kind.RETURNS, f"{type(error).__name__} from {rows}")
            raise
        self.step(Kind.RETURNS, f"handled {rows}")


class _Course:
    """One race in progress, and its judge.

    A handler that raised leaves its row to others: each worker may try a row that fails. A worker
    whose handler returned has the row until its outcome is known, and for good if it was processed.
    Before that, the same worker may call the handler again, to redo a batch whose transaction was
    lost.
    """

    def __init__(
        self, processor: BatchProcessor[Any], workers: int, seed: int, using: str, timeout: float
    ) -> None:
        self.processor, self.using = processor, using
        self._seed = seed
        self.turns = Turns(workers, time.monotonic() + timeout)
        self._workers = [_Worker(number, self) for number in range(1, workers + 1)]
        # Which worker has each row now, and which one has finished it.
        self._active: dict[Any, int] = {}
        self._processed: dict[Any, int] = {}
        self._handled: dict[Any, list[int]] = {}
        self._double = ""

    def run(self, parameters: Mapping[str, Any]) -> Race:
        threads = [
            threading.Thread(
                target=worker.run,
                args=(parameters,),
                name=f"{self.processor.name}: worker {worker.number}",
                daemon=True,
            )
            for worker in self._workers
        ]
        sender = type(self.processor)
        row_finished.connect(self._settled, sender=sender)
        try:
            for thread in threads:
                thread.start()
            in_time = self.turns.give(self._schedule)
        finally:
            self.call_off()
            for thread in threads:
                thread.join(END_WITHIN)
            row_finished.disconnect(self._settled, sender=sender)
        self._judge(in_time=in_time)
        reports = tuple(worker.report for worker in self._workers if worker.report is not None)
        raise_asserted(reports)
        if not any(getattr(report, count) for report in reports for count in COUNTS):
            raise AssertionError(
                f"{self.processor.name}: expected pending rows to race for, got none, so nothing "
                "was tested; create rows before the race, and commit them."
            )
        handled = {pk: tuple(workers) for pk, workers in self._handled.items()}
        return Race(reports, handled, str(self.turns))

    def _schedule(self) -> None:
        """Move the workers: to the places where mistakes show, and then at random."""
        turns, standing, last = self.turns, self.turns.standing, len(self._workers)
        # All workers read their candidates before any worker locks one.
        for worker in range(1, last + 1):
            while standing.get(worker) is Kind.READ:
                turns.move(worker)
        # The first worker has handled a row and holds its lock, while the second comes to the same
        # row: a worker that does not lock handles it, too.
        self._move_to(1, Kind.RETURNS)
        if last > 2:
            self._move_to(2, Kind.RETURNS, Kind.WAITS)
        # The first worker has finished its row, and the last one comes to it with the candidates
        # from its first read: a worker that does not ask again handles it, too.
        self._move_to(1, Kind.SETTLED)
        self._move_to(last, Kind.RETURNS, Kind.WAITS)
        worker, rng = last, random.Random(self._seed)  # noqa: S311  # no secret
        while True:
            # In bursts: a worker that alternates with others at each step rarely ends a row alone.
            if worker not in standing or rng.random() < 0.5:  # a coin
                worker = rng.choice(sorted(standing))
            turns.move(worker)

    def _move_to(self, worker: int, *kinds: Kind) -> None:
        """Let one worker move until it stands before a step of these kinds, or has ended."""
        for _ in range(MOST):
            if self.turns.standing.get(worker) in {None, *kinds}:
                return
            self.turns.move(worker)

    def call_off(self) -> None:
        """Let no further row start, and let the workers end."""
        for worker in self._workers:
            worker.stop.set()
        self.turns.let_everybody_go()

    def refuse_double(self, pk: Any, worker: int) -> None:
        """Note a handler call; end the race if another worker has, or had, the row."""
        self._handled.setdefault(pk, []).append(worker)
        if pk in self._processed:
            had = f"worker {self._processed[pk]}, which had finished it"
        elif self._active.setdefault(pk, worker) != worker:
            had = f"worker {self._active[pk]}, which had not finished it"
        else:
            return
        self.turns.note(worker, f"row {pk} again!")
        self._double = self._double or f"row {pk} handled by {had}, and again by worker {worker}"
        self.call_off()
        raise _Double

    def let_go(self, pk: Any, worker: int) -> None:
        """Note that a worker no longer has a row."""
        if self._active.get(pk) == worker:
            del self._active[pk]

    def _settled(self, processor: object, pk: Any, outcome: str, **_: object) -> None:
        for worker in self._workers:
            if worker.twin is processor:
                if outcome == "processed":
                    self._processed[pk] = worker.number
                self.let_go(pk, worker.number)
                worker.step(Kind.SETTLED, f"row {pk} {outcome}")

    def _judge(self, *, in_time: bool) -> None:
        name = self.processor.name
        if self._double:
            raise AssertionError(
                f"{name}: expected each row to be handled by one worker, got {self._double} "
                f"(seed={self._seed}).\n\n{self.turns}"
            )
        for worker in self._workers:
            if worker.error is not None:
                raise worker.error
        if not in_time:
            raise AssertionError(
                f"{name}: expected the race to end before its timeout, got one that did not; use "
                f"fewer rows, or a longer timeout (seed={self._seed}).\n\n{self.turns}"
            )


def _summary(sql: str, params: Any) -> str:
    """Return a statement in a few words: its verb, its table, its last parameters."""
    table = _TABLE.search(sql)
    if table is None:
        return sql
    lock = "lock " if _LOCKS.search(sql) else ""
    given = [*map(str, params)] if isinstance(params, list | tuple) else []
    # The last ones, which include the row's key.
    last = f" ({', '.join(['…'] * (len(given) > 2) + given[-2:])})" if given else ""
    return f"{lock}{sql.split(None, 1)[0].upper()} {table[1]}{last}"


# --- turns: one of several threads moves at a time, from one of its steps to the next


#: Seconds after which a worker is assumed to wait for another, or to be in a long handler. Much
#: longer than any statement takes, so that a slow disk does not change the race.
PATIENCE = 3.0

#: Steps that are shown, the last ones, and characters of each.
LAST, WIDTH = 100, 34


class _Over(Exception):
    """No worker stands any more, or the time is up."""


class Turns:
    """Gives the turn to one of the workers that stand; they are numbered from 1.

    ``until``: when to give up, by the monotonic clock.
    """

    def __init__(self, workers: int, until: float) -> None:
        self._workers, self._until = workers, until
        self._changed = threading.Condition()
        #: The kind of step before which each worker stands; read by the schedule.
        self.standing: dict[int, Kind] = {}
        self._moving = set(range(1, workers + 1))
        self._slow: set[int] = set()
        self._everybody_goes = False
        self._taken: list[tuple[int, str]] = []

    # --- what the workers call

    def step(self, worker: int, kind: Kind, what: str) -> None:
        """Stand before a step until it is the worker's turn."""
        with self._changed:
            self._moving.discard(worker)
            self._slow.discard(worker)
            self.standing[worker] = kind
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._everybody_goes or worker not in self.standing)
            self.standing.pop(worker, None)
            self._moving.add(worker)
            self.note(worker, what)

    def note(self, worker: int, what: str) -> None:
        """Add a step to those that are shown, until the turns have ended."""
        if not self._everybody_goes:
            self._taken.append((worker, what))

    def ended(self, worker: int) -> None:
        """Note that a worker moves no more."""
        with self._changed:
            self._moving.discard(worker)
            self._changed.notify_all()

    def let_everybody_go(self) -> None:
        """End the turns: every worker that stands goes on, and no worker stops at a step again."""
        with self._changed:
            self._everybody_goes = True
            self._changed.notify_all()

    # --- the schedule

    def give(self, schedule: Callable[[], None]) -> bool:
        """Let the schedule ``move()`` workers until all have ended; return whether it was in time.

        It is also in time if the turns were ended.
        """
        with self._changed:
            # The start of the race must not depend on how fast the threads connect.
            self._changed.wait_for(lambda: not self._moving, self._until - time.monotonic())
            with suppress(_Over):
                self._look()
                schedule()
            return self._everybody_goes or not (self._moving or self.standing)

    def move(self, worker: int) -> None:
        """Give the turn to a worker that stands; to be called by the schedule."""
        del self.standing[worker]
        self._moving.add(worker)
        self._changed.notify_all()
        self._look()

    def _look(self) -> None:
        """Wait until a worker stands that may move."""
        # A worker may wait in the database for another worker's lock: then the turn passes on.
        if not self._changed.wait_for(
            lambda: self._everybody_goes or not self._moving - self._slow, PATIENCE
        ):
            self._slow |= self._moving
        left = self._until - time.monotonic()
        self._changed.wait_for(
            lambda: self.standing or not self._moving or self._everybody_goes, max(left, 0)
        )
        if not self.standing or left <= 0 or self._everybody_goes:
            raise _Over

    def __str__(self) -> str:
        """Return the last steps, with one column per worker."""
        lines = [_line("step", [f"worker {n}" for n in range(1, self._workers + 1)])]
        for number, (worker, what) in [*enumerate(self._taken, 1)][-LAST:]:
            cells = ["", *[""] * self._workers]
            cells[worker] = what
            lines.append(_line(str(number), cells[1:]))
        return "\n".join(lines)


def _line(number: str, cells: list[str]) -> str:
    shown = (f"{cell:.{WIDTH}}".ljust(WIDTH) for cell in cells)
    return f"{number:>4}  {'  '.join(shown)}".rstrip()
