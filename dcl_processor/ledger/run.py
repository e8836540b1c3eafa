"""What the ledger does in a run: it lets rows start, and records what became of them.

All is asked and written on the run's own connection, by its thread, between its transactions.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

from dcl_processor.ledger.control import is_paused, take
from dcl_processor.ledger.models import REASON, TEXT, records
from dcl_processor.ledger.records import RUN, prune
from dcl_processor.operator.diagnosis import describe
from dcl_processor.options.worker import worker_name
from dcl_processor.pending import steady as time
from dcl_processor.pending.clock import DatabaseNow, Later
from dcl_processor.report.errors import described, ends_the_run
from dcl_processor.report.observer import EndRun, RunEvent
from dcl_processor.report.outcomes import Outcome
from dcl_processor.report.report import COUNTS, TRIED

T = TypeVar("T")

logger = logging.getLogger("dcl_processor.operations")

#: Seconds between two looks whether a processor is paused, and between two writes of a run.
LOOK_EVERY, WRITE_EVERY = 1.0, 10.0

#: Seconds for which a run waits until the rate lets a row start; then it ends.
PATIENCE = 10.0

#: Seconds after the last run in which the next one goes on with its record, and for how long.
#: A watch makes many small runs.
GO_ON_WITHIN, GO_ON_FOR = 60.0, 600.0

#: Each record whose key this divides deletes old ones at its end.
PRUNE_EACH = 100

#: Seconds without a further question in this process after an error.
SILENCE = 60.0


class _Silence:
    until = 0.0


def quietly(ask: Callable[[], T], otherwise: T) -> T:
    """Return the answer, or without one something else; an error is logged, and costs no row."""
    if time.monotonic() < _Silence.until:
        return otherwise
    try:
        return ask()
    except Exception as error:
        if ends_the_run(error):
            raise
        _Silence.until = time.monotonic() + SILENCE
        about = (SILENCE, described(error))
        logger.warning("the ledger cannot be used, and is not asked for %d s: %s", *about)
        return otherwise


@dataclass(slots=True)
class _Open:
    """A record of runs, and what this process knows of it; times are by its clock."""

    by: str = field(default_factory=worker_name)
    began: float = field(default_factory=time.monotonic)
    ended: float = field(default_factory=time.monotonic)
    pk: int | None = None
    counts: Counter[str] = field(default_factory=Counter)
    error: str = ""
    #: Whether its end is still to be written.
    is_open: bool = False

    @property
    def goes_on(self) -> bool:
        """Whether the next run is recorded in it."""
        now = time.monotonic()
        is_young = now - self.ended < GO_ON_WITHIN and now - self.began < GO_ON_FOR
        return is_young and self.by == worker_name()

    def write(self, name: str, more: int = 0, stopped: str = "") -> None:
        """Write what is known; ``more``: rows that no report has counted."""
        self.is_open = not stopped
        values: dict[str, Any] = {
            "seen_at": DatabaseNow(),
            "rows": sum(self.counts[each] for each in TRIED) + more,
            "counts": {each: number for each, number in self.counts.items() if number},
            "stopped": stopped[:REASON],
            "error": self.error,
        }
        # New, or deleted meanwhile.
        pk = self.pk
        if pk is None or not records().filter(pk=pk).update(**values):
            began = Later(timedelta(seconds=self.began - time.monotonic()))
            own = {"processor": name, "action": RUN, "by": self.by, "at": began}
            pk = self.pk = records().create(**own, **values).pk
        if stopped and pk % PRUNE_EACH == 0:
            prune()


class _Last(threading.local):
    """The records of this thread's last runs, by the processors' names."""

    def __init__(self) -> None:
        self.of: dict[str, _Open] = {}


_last = _Last()

#: Whether processors were paused when this process was last told.
_paused: dict[str, bool] = {}


class LedgerOfRun:
    """The observer and gate of one run."""

    keeps_rate = True

    def __init__(self, processor: Any) -> None:
        self._name: str = processor.name
        self._rate: float | None = processor.rate
        self._looked_at, self._waits_since = -math.inf, math.inf
        self._written_at = time.monotonic()
        self._rows = 0
        last = _last.of.get(self._name)
        self._record = last if last and last.goes_on else _Open()

    def may_start(self, n: int) -> int:
        """Return how many rows may start: none while the processor is paused."""
        now = time.monotonic()
        if now - self._looked_at >= LOOK_EVERY:
            self._looked_at = now
            was_paused = _paused.get(self._name, False)
            _paused[self._name] = quietly(lambda: is_paused(self._name), was_paused)
        if _paused[self._name]:
            raise EndRun("paused")
        # A process that is killed has left a trace.
        if self._record.pk is None or now - self._written_at >= WRITE_EVERY:
            self._written_at = now
            quietly(lambda: self._record.write(self._name, self._rows), None)
        return n if self._rate is None else self._take(n, self._rate)

    def _take(self, n: int, rate: float) -> int:
        now = time.monotonic()
        # Without an answer no row starts.
        if taken := quietly(lambda: take(self._name, rate, n), 0):
            self._waits_since = math.inf
            return taken
        self._waits_since = min(self._waits_since, now)
        if now - self._waits_since > PATIENCE:
            raise EndRun("throttled")
        return 0

    def ended(self, outcomes: Sequence[Outcome]) -> None:
        self._rows += len(outcomes)

    def run(self, event: RunEvent) -> None:
        """Record the end of the run, unless it has tried no row, and nothing was wrong."""
        report = event.report
        if report is None:
            return
        first = report.failures[0].error if report.failures else None
        cause = event.error or report.error or first
        if not (self._rows or cause or self._record.is_open):
            return
        record = _last.of[self._name] = self._record
        record.counts.update({each: getattr(report, each) for each in (*COUNTS, "to_retry")})
        record.error = describe(cause)[:TEXT] if cause is not None else record.error
        record.ended = time.monotonic()
        quietly(lambda: record.write(self._name, stopped=report.stopped), None)
