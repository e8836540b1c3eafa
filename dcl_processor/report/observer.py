"""Two doors of the engine: what a run tells, and what it asks before it takes rows.

An ``Observer`` looks on at runs and rows, a ``Gate`` lets rows start. They come from the options
``observers`` and ``gates``, and from ``observers_installed``, to which an app adds at its
``ready()``. All of their methods are called in the run's thread, those of a ``Gate`` and the end of
a run or row outside any transaction of the run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, Protocol, runtime_checkable

from dcl_processor.report.errors import raise_interrupt
from dcl_processor.report.log import log
from dcl_processor.report.outcomes import Outcome
from dcl_processor.report.report import Report


@dataclass(frozen=True, slots=True)
class RunEvent:
    """A run begins, or has ended, with a ``report``; ``error``: what it raised, if it did.

    ``using``: the alias of its database. ``run_id``: a text that no other run has.
    """

    kind: Literal["started", "ended"]
    processor: Any
    run_id: str
    using: str
    report: Report | None = None
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class RowEvent:
    """A handler is about to be called for a row, or its row is over, and its transaction has ended.

    ``attempt``: its number, if a ``retry`` counts it. When it begins: ``since``: since when the row
    was pending, if ``pending_since`` names a column; ``together``: the rows of the call. When it
    has ended: ``outcome``: "processed", "failed", "discarded", "snoozed" or "lease_lost";
    ``duration``: seconds that the handler took; ``error``: of a row that failed or was discarded;
    ``is_retried``: it is to be tried again.

    A variable of the context (``contextvars``) that is set when it begins is set in the handler.
    """

    kind: Literal["started", "ended"]
    processor: Any
    run_id: str
    pk: Any
    attempt: int | None = None
    since: datetime | None = None
    together: int = 1
    outcome: str | None = None
    duration: float | None = None
    error: Exception | None = field(default=None, compare=False)
    is_retried: bool = False


@runtime_checkable
class Observer(Protocol):
    """Looks on. What it raises is logged once for each run, and costs no row."""

    def run(self, event: RunEvent) -> None:
        """Take note of a run that begins, or has ended."""

    def row(self, event: RowEvent) -> None:
        """Take note of a row whose handler is about to be called, or that is over."""


@runtime_checkable
class Gate(Protocol):
    """Decides how many rows may start now. What it raises ends the run.

    One that keeps the processor's option ``rate`` has the attribute ``keeps_rate``.
    """

    def may_start(self, n: int) -> int:
        """Return how many of the next ``n`` rows may start; 0: it is asked again in 0.1 seconds.

        Raises ``EndRun`` to end the run.
        """
        ...

    def ended(self, outcomes: Sequence[Outcome]) -> None:
        """Take note of the outcomes of rows that were let in, once their transactions are over."""


class EndRun(Exception):
    """Raised by a gate: no further row starts in this run; ``Report.stopped`` is the ``reason``."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


#: Of each run that begins: its processor is given to each of these, which return an observer for
#: the run, or ``None``. One without ``row()`` looks on at the run alone, which costs its rows
#: nothing; one that is a gate as well is asked, too.
observers_installed: list[Callable[[Any], Any]] = []


class Observers:
    """The observers of one run; ``of_rows``: those that look at rows."""

    def __init__(self, processor: Any, run_id: str) -> None:
        found = [make(processor) for make in observers_installed]
        self.installed = [*filter(None, found)]
        self._all = [*self.installed, *processor.observers]
        self.of_rows = [each for each in self._all if hasattr(each, "row")]
        self._silent: set[tuple[int, str]] = set()
        self.processor, self.run_id = processor, run_id

    def run(self, kind: Literal["started", "ended"], using: str, **known: Any) -> None:
        """Tell of the run."""
        event = RunEvent(kind, self.processor, self.run_id, using, **known)
        for each in self._all:
            self._tell(each, "run", event)

    def row(self, kind: Literal["started", "ended"], pk: Any, **known: Any) -> None:
        """Tell of a row."""
        event = RowEvent(kind, self.processor, self.run_id, pk, **known)
        for each in self.of_rows:
            self._tell(each, "row", event)

    def _tell(self, observer: Any, method: str, event: RunEvent | RowEvent) -> None:
        try:
            getattr(observer, method)(event)
        except BaseException as error:  # noqa: BLE001  # an observer costs no row
            raise_interrupt(error)
            if (id(observer), method) not in self._silent:
                self._silent.add((id(observer), method))
                message, name = "%s.%s() raised, and the run goes on: %s", type(observer).__name__
                log(logging.WARNING, message, name, method, error, error=error)


class Gates:
    """The gates of one run: ``all`` of them."""

    def __init__(self, processor: Any, observers: Observers) -> None:
        found = [each for each in observers.installed if isinstance(each, Gate)]
        # What is installed is asked last: it uses up a token for each row that it lets in.
        self.all: list[Gate] = [*processor.gates, *found]

    def may_start(self, n: int) -> int:
        """Return how many rows each gate lets in."""
        for each in self.all:
            n = min(n, each.may_start(n))
            if n <= 0:
                return 0
        return n

    def ended(self, outcomes: Sequence[Outcome]) -> None:
        """Tell of rows that were let in."""
        for each in self.all:
            each.ended(outcomes)
