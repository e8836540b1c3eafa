"""One of the workers that race."""

from __future__ import annotations

import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any, Protocol

from django.db import connections

from dcl_processor.interrupts import Interruption
from dcl_processor.processor import BatchProcessor
from dcl_processor.report import Report

from .handlers import HandlerAsserted, asserting, watched
from .turns import Kind, Step, Turns


class Course(Protocol):
    """What a worker needs of its race."""

    processor: BatchProcessor[Any]
    using: str
    turns: Turns
    trace: Trace
    referee: Referee

    def call_double(self, double: str) -> None:
        """Note a row that was handled twice, and end the race."""

    def call_off(self) -> None:
        """Let no further row start, and let the workers end."""


class Worker:
    """One worker that runs the processor, in its own thread."""

    def __init__(self, number: int, course: Course) -> None:
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
        reads = sql.lstrip(" (").upper().startswith("SELECT") and not _LOCKS.search(sql)
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


# --- records which worker has which row, and detects a row that is handled twice


class Referee:
    """Judges handler calls; workers are numbered from 1.

    A handler that raised leaves its row to others: each worker may try a row that fails. A worker
    whose handler returned has the row until its outcome is known, and for good if it was processed.
    Before that, the same worker may call the handler again, to redo a batch whose transaction was
    lost.
    """

    def __init__(self, *, repeats: bool) -> None:
        self._repeats = repeats
        self._lock = threading.Lock()
        self._active: dict[Any, int] = {}
        self._processed: dict[Any, int] = {}
        self.handled: dict[Any, list[int]] = defaultdict(list)

    def starts(self, pk: Any, worker: int) -> str:
        """Note a handler call; return which worker has the row already, or an empty string."""
        with self._lock:
            self.handled[pk].append(worker)
            # Each run may handle rows that may rightly stay pending.
            if pk in self._processed and not self._repeats:
                return f"worker {self._processed[pk]}, which had finished it"
            if self._active.setdefault(pk, worker) != worker:
                return f"worker {self._active[pk]}, which had not finished it"
            return ""

    def raised(self, pk: Any, worker: int) -> None:
        """Note that the handler raised."""
        with self._lock:
            self._let_go(pk, worker)

    def settled(self, pk: Any, worker: int, outcome: str) -> None:
        """Note a row's outcome, as ``row_finished`` sends it."""
        with self._lock:
            self._let_go(pk, worker)
            if outcome == "processed":
                self._processed[pk] = worker

    def _let_go(self, pk: Any, worker: int) -> None:
        if self._active.get(pk) == worker:
            del self._active[pk]


# --- the steps of a race's workers, with one column per worker


#: Lines at the beginning, which show the opening, and at the end, which show the result.
FIRST, LAST = 40, 60
WIDTH = 34

_TABLE = re.compile(r'\b(?:FROM|UPDATE|INTO)\s+["`]?([\w.]+)', re.IGNORECASE)
_SAVEPOINT = re.compile(r'["`]s\d+_x(\d+)["`]')  # Django's names hold the thread's number
_LOCKS = re.compile(r" FOR (?:NO KEY )?UPDATE")


class Trace:
    """The steps in the order in which they were taken."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._steps: list[tuple[int, str]] = []
        self._lock = threading.Lock()
        self._complete = False

    def note(self, worker: int, what: str, *, last: bool = False) -> None:
        """Add a step of a worker, numbered from 1; steps after the last one are ignored."""
        with self._lock:
            if not self._complete:
                self._steps.append((worker, what))
            self._complete = self._complete or last

    def __str__(self) -> str:
        with self._lock:
            steps = list(zip(count(1), self._steps, strict=False))
        left_out = len(steps) - FIRST - LAST
        lines = [self._line("step", [f"worker {n}" for n in range(1, self._workers + 1)])]
        if left_out > 0:
            lines += self._lines(steps[:FIRST])
            lines += [f"  … {left_out} steps …", *self._lines(steps[-LAST:])]
        else:
            lines += self._lines(steps)
        return "\n".join(lines)

    def _lines(self, steps: Sequence[tuple[int, tuple[int, str]]]) -> Iterator[str]:
        for number, (worker, what) in steps:
            cells = [""] * self._workers
            cells[worker - 1] = what
            yield self._line(str(number), cells)

    def _line(self, number: str, cells: Sequence[str]) -> str:
        shown = (f"{cell:.{WIDTH}}".ljust(WIDTH) for cell in cells)
        return f"{number:>4}  {'  '.join(shown)}".rstrip()


def summary(sql: str, params: Any) -> str:
    """Return a statement in a few words: its verb, its table, its parameters."""
    verb = sql.split(None, 1)[0].upper()
    table = _TABLE.search(sql)
    if table is None:
        return _SAVEPOINT.sub(r"\1", sql)
    lock = "lock " if _LOCKS.search(sql) else ""
    return f"{lock}{verb} {table[1]} {_values(params)}".rstrip()


def _values(params: Any, most: int = 2) -> str:
    """Return the last parameters, which include the row's key."""
    if not params or not isinstance(params, list | tuple):
        return ""
    left_out = ["…"] if len(params) > most else []
    return f"({', '.join([*left_out, *map(str, params[-most:])])})"
