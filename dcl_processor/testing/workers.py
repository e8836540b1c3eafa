"""One of the workers that race."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

from django.db import connections

from dcl_processor.interrupts import Interruption
from dcl_processor.processor import BatchProcessor
from dcl_processor.report import Report

from .handlers import HandlerAsserted, asserting, watched
from .referee import Referee
from .trace import Trace, is_plain_read, summary
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
        kind = Kind.READ if is_plain_read(sql) else Kind.STATEMENT
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
