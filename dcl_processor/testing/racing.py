"""Workers that race in lock-step: a mistake shows each time and not once a month."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from django.db import connections
from django.db.models import Q

from dcl_processor import steady as time
from dcl_processor.interrupts import Interruption
from dcl_processor.locking.isolation import refuse_outer_transaction
from dcl_processor.processor import BatchProcessor
from dcl_processor.report import COUNTS, Report
from dcl_processor.signals import row_finished
from dcl_processor.values import expect_whole_number

from .handlers import HandlerAsserted, asserting, raise_asserted, watched
from .questions import question_of, refuse_where_nothing_is_tested
from .referee import LOCKS, Referee, Trace, summary
from .turns import Kind, Standing, Step, Turns

#: Seconds in which the workers have to end after the race was called off.
END_WITHIN = 30.0


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
    question = question_of(processor, using)
    what = f"race({processor.name})"
    refuse_where_nothing_is_tested(question.using, what)
    refuse_outer_transaction(question.using, what)
    parameters = {"filter": filter, "using": using, "wait_for_locked": wait_for_locked}
    return _Course(processor, workers, seed, question.using).run(parameters, timeout)


class Worker:
    """One worker that runs the processor, in its own thread."""

    def __init__(self, number: int, course: _Course) -> None:
        self.number = number
        self.course = course
        self.twin = watched(course.processor, self._handling)
        self.stop = _Stop(lambda: self._step(Kind.WAITS, "waits for locked rows"))
        self.report: Report | None = None
        self.error: BaseException | None = None

    def thread(self, parameters: Mapping[str, Any]) -> threading.Thread:
        name = f"{self.course.processor.name}: worker {self.number}"
        return threading.Thread(target=self._run, args=(parameters,), name=name, daemon=True)

    def settled(self, pk: Any, outcome: str) -> None:
        self.course.referee.settled(pk, self.number, outcome)
        self._step(Kind.SETTLED, f"row {pk} {outcome}")

    def _run(self, parameters: Mapping[str, Any]) -> None:
        try:
            with ExitStack() as watching:
                # A new connection's own statements are no part of the race.
                connections[self.course.using].ensure_connection()
                for alias in connections:
                    watching.enter_context(connections[alias].execute_wrapper(self._statement))
                self.report = self.twin.run(**parameters, stop=self.stop)
        except HandlerAsserted as carrier:
            self._lose(carrier.error)
        except BaseException as error:  # noqa: BLE001  # raised in the test's own thread
            self._lose(error)
        finally:
            connections.close_all()
            self.course.turns.ended(self.number)

    def _lose(self, error: BaseException) -> None:
        self.error = error
        self.course.call_off()

    def _statement(self, execute: Callable[..., Any], sql: str, params: Any, *more: Any) -> Any:
        reads = sql.lstrip(" (").upper().startswith("SELECT") and not LOCKS.search(sql)
        kind = Kind.READ if reads else Kind.STATEMENT
        self._step(kind, summary(sql, params))
        return execute(sql, params, *more)

    @contextmanager
    def _handling(self, pks: Sequence[Any]) -> Iterator[None]:
        rows = f"row {', '.join(map(str, pks))}"
        self._step(Kind.STARTS, f"handler({rows})")
        referee = self.course.referee
        for pk in pks:
            if had := referee.starts(pk, self.number):
                self.course.trace.note(self.number, f"row {pk} again!", last=True)
                self.course.call_double(
                    f"row {pk} handled by {had}, and again by worker {self.number}"
                )
                # Before the handler: the test does not need the effect of a second call.
                raise _Double
        try:
            with asserting():
                yield
        except BaseException as error:
            for pk in pks:
                referee.raised(pk, self.number)
            self._step(Kind.RETURNS, f"{type(error).__name__} from {rows}")
            raise
        self._step(Kind.RETURNS, f"handled {rows}")

    def _step(self, kind: Kind, what: str) -> None:
        self.course.turns.step(self.number, Step(kind, what))
        self.course.trace.note(self.number, what)


class _Stop(threading.Event):
    """A run waits for locked rows in its stop's ``wait()``, which is a step of the race here."""

    def __init__(self, step: Callable[[], None]) -> None:
        super().__init__()
        self._step = step

    def wait(self, timeout: float | None = None) -> bool:
        self._step()
        # Other workers move during the step; this short wait is for lock holders outside the race.
        return super().wait(None if timeout is None else min(timeout, 0.01))


class _Double(Interruption):
    """Ends a worker that was about to handle another worker's row again."""


class _Course:
    """One race in progress."""

    def __init__(self, processor: BatchProcessor[Any], workers: int, seed: int, using: str) -> None:
        self.processor = processor
        self.seed = seed
        self.using = using
        self.turns = Turns(workers)
        self.trace = Trace(workers)
        self.referee = Referee(repeats=processor.repeats)
        self.workers = [Worker(number, self) for number in range(1, workers + 1)]
        self.double = ""

    def run(self, parameters: Mapping[str, Any], timeout: float) -> Race:
        until = time.monotonic() + timeout
        threads = [worker.thread(parameters) for worker in self.workers]
        sender = type(self.processor)
        row_finished.connect(self._tell, sender=sender)
        try:
            for thread in threads:
                thread.start()
            in_time = self.turns.give(seeded(len(self.workers), self.seed), until)
        finally:
            self.call_off()
            for thread in threads:
                thread.join(END_WITHIN)
            row_finished.disconnect(self._tell, sender=sender)
        self._judge(in_time=in_time)
        reports = [worker.report for worker in self.workers if worker.report is not None]
        raise_asserted(reports)
        self._refuse_no_race(reports)
        handled = {pk: tuple(workers) for pk, workers in self.referee.handled.items()}
        return Race(tuple(reports), handled, str(self.trace))

    def call_double(self, double: str) -> None:
        """Note the first row that was handled twice, and end the race."""
        self.double = self.double or double
        self.call_off()

    def call_off(self) -> None:
        """Let no further row start, and let the workers end."""
        for worker in self.workers:
            worker.stop.set()
        self.turns.let_everybody_go()

    def _tell(self, processor: object, pk: Any, outcome: str, **_: object) -> None:
        for worker in self.workers:
            if worker.twin is processor:
                worker.settled(pk, outcome)

    def _judge(self, *, in_time: bool) -> None:
        name = self.processor.name
        if self.double:
            raise AssertionError(
                f"{name}: expected each row to be handled by one worker, got {self.double} "
                f"(seed={self.seed}).\n\n{self.trace}"
            )
        for worker in self.workers:
            if worker.error is not None:
                raise worker.error
        if not in_time:
            raise AssertionError(
                f"{name}: expected the race to end before its timeout, got one that did not; use "
                f"fewer rows, or a longer timeout (seed={self.seed}).\n\n{self.trace}"
            )

    def _refuse_no_race(self, reports: Sequence[Report]) -> None:
        if not any(getattr(report, count) for report in reports for count in COUNTS):
            raise AssertionError(
                f"{self.processor.name}: expected pending rows to race for, got none, so "
                "nothing was tested; create rows before the race, and commit them."
            )


#: The most steps that one worker takes in a part of the opening.
MOST = 200

Schedule = Generator[int, Standing, None]


def seeded(workers: int, seed: int) -> Callable[[Standing], int]:
    """Return a function that picks one of the workers that stand before a step."""
    schedule: Schedule | None = None

    def choose(standing: Standing) -> int:
        nonlocal schedule
        if schedule is None:
            schedule = _turns(workers, random.Random(seed), standing)  # noqa: S311  # no secret
            return next(schedule)
        return schedule.send(standing)

    return choose


def _turns(workers: int, rng: random.Random, standing: Standing) -> Schedule:
    # All workers read their candidates before any worker locks one.
    for worker in range(1, workers + 1):
        while worker in standing and standing[worker].kind is Kind.READ:
            standing = yield worker
    # The first worker has handled a row and holds its lock, while the second comes to the same row:
    # a worker that does not lock handles it, too.
    standing = yield from _until(1, {Kind.RETURNS}, standing)
    if workers > 2:
        standing = yield from _until(2, {Kind.RETURNS, Kind.WAITS}, standing)
    # The first worker has finished its row, and the last one comes to it with the candidates from
    # its first read: a worker that does not ask again handles it, too.
    standing = yield from _until(1, {Kind.SETTLED}, standing)
    standing = yield from _until(workers, {Kind.RETURNS, Kind.WAITS}, standing)
    worker = workers
    while True:
        # In bursts: a worker that alternates with others at each step rarely ends a row alone.
        if worker not in standing or rng.random() < 0.5:  # a coin
            worker = rng.choice(sorted(standing))
        standing = yield worker


def _until(worker: int, kinds: set[Kind], standing: Standing) -> Generator[int, Standing, Standing]:
    """Let one worker move until it stands before a step of these kinds, or has ended."""
    for _ in range(MOST):
        if worker not in standing or standing[worker].kind in kinds:
            break
        standing = yield worker
    return standing
