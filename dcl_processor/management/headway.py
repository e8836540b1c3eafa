"""How far a run is: rows so far, of how many, how fast, and how long it will still take."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from django.db import connections
from django.db.models import Q

from dcl_processor import steady as time
from dcl_processor.insights.answer import Answer, How
from dcl_processor.insights.status import SIZE_TIMEOUT, Size, size
from dcl_processor.processor import BatchProcessor
from dcl_processor.signals import OnRow
from dcl_processor.values import about

#: Seconds: the rate is that of the last so many. Of rows that take longer, at least so many count.
WINDOW, KEPT = 60.0, 10

#: Seconds: at most so often the number of rows is kept for the rate; a shorter run has no rate.
SAMPLE = 1.0

#: Digits of an estimate that are shown.
_DIGITS = 4


class Headway:
    """The figures of one run, for a bar or for lines; threads may share it.

    ``size``: the rows that were pending before the run. ``limit``: of the run. ``clock``: returns
    seconds. ``is_estimated``: whether another ``learn()`` may correct the figures.
    """

    def __init__(
        self,
        name: str,
        size: Size,
        *,
        limit: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self._limit = limit
        self._clock = clock
        self._lock = threading.Lock()
        self._outcomes: Counter[str] = Counter()
        self._samples = deque([(clock(), 0)])
        self._total = Answer[int].unknown("not asked yet")
        self._least = 0
        self.is_estimated = False
        self._basis: Any = object()
        self.learn(size)

    def count(self, outcome: str) -> None:
        """Count a row's outcome."""
        with self._lock:
            self._outcomes[outcome] += 1
            now, samples = self._clock(), self._samples
            if len(samples) > 1 and now - samples[-2][0] < SAMPLE:
                samples.pop()
            samples.append((now, self._outcomes.total()))

    def learn(self, size: Size) -> None:
        """Correct the total by the rows that are pending now."""
        with self._lock:
            outcomes = self._outcomes
            # Rows that failed, or are to be tried later, are still among the pending ones.
            gone = outcomes.total() - outcomes["failed"] - outcomes["snoozed"]
            self._least = max(self._least, gone + size.least)
            if size.counted.how is How.EXACT:
                self._total = Answer(gone + size.least)
            elif size.estimate is not None and self._basis != size.basis:
                self._total = Answer(gone + size.estimate, How.ESTIMATED)
                self._basis = size.basis
            if self._total.how is not How.EXACT and (self._total.value or 0) < self._least:
                self._total = Answer(self._least - 1, How.MORE_THAN)
            has_estimate = self.is_estimated or size.estimate is not None
            self.is_estimated = has_estimate and self.total.how is not How.EXACT

    @property
    def done(self) -> int:
        """Rows for which a handler was called."""
        return self._outcomes.total()

    @property
    def failed(self) -> int:
        """Rows that failed, perhaps to be tried again."""
        return self._outcomes["failed"]

    @property
    def total(self) -> Answer[int]:
        """Rows that the run has in all; a number that was reached already is no estimate."""
        total, limit = self._total, self._limit
        if limit is not None and limit <= self._least:
            return Answer(limit)
        if limit is not None and total.how is How.ESTIMATED:
            total = Answer(min(total.value or 0, limit), How.ESTIMATED)
        if total.how is How.ESTIMATED and (total.value or 0) <= self.done:
            return Answer(self.done, How.MORE_THAN)
        if total.how is How.EXACT:
            # A row may be handled, but not counted yet, when the others are counted.
            return Answer(max(total.value or 0, self.done))
        return total

    @property
    def fraction(self) -> float | None:
        """The part of the rows that is done, from 0 to 1; ``None``: it is not known."""
        total = self.total
        if total.value is None or total.how is How.MORE_THAN:
            return None
        return min(1.0, self.done / total.value) if total.value else 1.0

    @property
    def rate(self) -> float | None:
        """Rows per second of the last minute, or of the last slow rows; ``None``: too early."""
        with self._lock:
            now = self._clock()
            while len(self._samples) > KEPT and now - self._samples[0][0] > WINDOW:
                self._samples.popleft()
            since, before = self._samples[0]
            done = self._outcomes.total()
        return (done - before) / (now - since) if now - since >= SAMPLE else None

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the last row is done at the present rate; ``None``: it is not known."""
        total, rate = self.total, self.rate
        if self.fraction is None or not rate:
            return None
        return max(0, (total.value or 0) - self.done) / rate

    def position(self) -> str:
        """Write the rows so far, and of how many; an estimate has a ``~``."""
        total, fraction = self.total, self.fraction
        if total.value is None:
            return f"{self.done:,} rows"
        if fraction is None:
            more = total.value > self.done
            return f"{self.done:,} of more than {total.value:,}" if more else f"{self.done:,} rows"
        mark = "~" if total.how is How.ESTIMATED else ""
        number = rounded(total.value) if mark else total.value
        return f"{self.done:,} of {mark}{number:,} ({int(100 * fraction)} %)"

    def speed(self) -> str:
        """Write the rate; empty: there is none."""
        rate = self.rate
        if not rate:
            return ""
        return f"{rate:,.0f} rows/s" if rate >= 1 else f"{60 * rate:.2g} rows/min"

    def left(self) -> str:
        """Write the remaining time; empty: it is not known."""
        seconds = self.seconds_left
        return f"{about(seconds)} left" if seconds else ""

    def line(self) -> str:
        """Write all figures in one line."""
        failed = f"{self.failed:,} failed" if self.failed else ""
        figures = (self.position(), failed, self.speed(), self.left())
        return f"{self.name}: {', '.join(filter(None, figures))}"

    def as_dict(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        fraction, rate, seconds = self.fraction, self.rate, self.seconds_left
        return {
            "name": self.name,
            "done": self.done,
            "failed": self.failed,
            "total": self.total.as_dict(),
            "percent": None if fraction is None else int(100 * fraction),
            "rows_per_second": None if rate is None else round(rate, 1),
            "seconds_left": None if seconds is None else round(seconds),
        }


def rounded(number: int) -> int:
    """Return an estimate with as many digits as it can be trusted for."""
    return round(number, min(0, _DIGITS - len(str(number))))


# --- a run that a person follows at a terminal


#: Seconds between two corrections of an estimate, and between two lines.
CORRECTED_EACH, LINE_EACH = 30.0, 10.0

#: Shows the figures in a block, and gives what counts a row's outcome.
Show = Callable[[Headway], AbstractContextManager[OnRow]]


@contextmanager
def followed(
    processor: BatchProcessor[Any],
    show: Show,
    *,
    filter: Q | None,
    using: str | None,
    limit: int | None,
) -> Iterator[OnRow | None]:
    """Show how far a run is while the block runs it; yield what counts a row, if any is pending."""
    ask = partial(size, processor, filter=filter, using=using)
    found = ask()
    if found.counted.value == 0:
        yield None
        return
    headway = Headway(processor.name, found, limit=limit)
    with corrected(headway, ask), show(headway) as on_row:
        yield on_row


@contextmanager
def corrected(headway: Headway, ask: Callable[[], Size]) -> Iterator[None]:
    """Correct the figures by the size of the backlog while the block runs, if they are estimates.

    ``ask``: returns the size at that moment.
    """
    if not headway.is_estimated:
        yield
        return
    ended = threading.Event()
    # In a thread, which has a connection of its own: that of the run is in a row's transaction, or
    # has sent the beginning of the next one.
    thread = threading.Thread(
        target=_correct, args=(headway, ask, ended), name="dcl_processor.following", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        ended.set()
        # Each of its two questions ends with its time limit.
        thread.join(2 * SIZE_TIMEOUT)


def _correct(headway: Headway, ask: Callable[[], Size], ended: threading.Event) -> None:
    while headway.is_estimated and not ended.wait(CORRECTED_EACH):
        try:
            headway.learn(ask())
        finally:
            # A session that waits for its next question would be one more of the server's.
            connections.close_all()


@contextmanager
def lines(
    headway: Headway,
    *,
    write: Callable[[Headway], None],
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[OnRow]:
    """Call ``write`` now and then, when a row is done."""
    last, lock = clock(), threading.Lock()

    def count(outcome: str) -> None:
        nonlocal last
        headway.count(outcome)
        with lock:
            is_time = clock() - last >= LINE_EACH
            last = clock() if is_time else last
        if is_time:
            write(headway)

    yield count
