"""What the ledger does in a run: it lets rows start, and records what became of them.

All is asked and written on the run's own connection, by its thread, between its transactions.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from dcl_processor.ledger.models import REASON, RUN_WAIT, TEXT, alias, records, waiting
from dcl_processor.ledger.pausing import is_paused
from dcl_processor.ledger.records import RUN, prune
from dcl_processor.ledger.switch import quietly
from dcl_processor.ledger.tokens import Tokens
from dcl_processor.operator.diagnosis import describe
from dcl_processor.options.worker import worker_name
from dcl_processor.pending import steady as time
from dcl_processor.pending.clock import DatabaseNow, Later
from dcl_processor.report.observer import EndRun, RunEvent
from dcl_processor.report.outcomes import Outcome
from dcl_processor.report.report import COUNTS, TRIED, Report
from dcl_processor.sql.errors import reconnected

#: Seconds between two looks whether a processor is paused, and between two writes of a run.
LOOK_EVERY, WRITE_EVERY = 1.0, 10.0

#: Seconds after the last run in which the next one goes on with its record, and for how long.
#: A watch makes many small runs.
GO_ON_WITHIN, GO_ON_FOR = 60.0, 3600.0

#: Each record whose key this divides deletes old ones at its end.
PRUNE_EACH = 100


@dataclass(slots=True)
class _Open:
    """A record, and what this process knows of it."""

    by: str = field(default_factory=worker_name)
    began: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    pk: int | None = None
    counts: Counter[str] = field(default_factory=Counter)
    error: str = ""

    @property
    def goes_on(self) -> bool:
        """Whether the next run is recorded in it."""
        now = time.monotonic()
        is_young = now - self.ended < GO_ON_WITHIN and now - self.began < GO_ON_FOR
        return is_young and self.by == worker_name()

    @property
    def tried(self) -> int:
        return sum(self.counts[name] for name in TRIED)


class _Last(threading.local):
    """The records of this thread's last runs, by the processors' names."""

    def __init__(self) -> None:
        self.of: dict[str, _Open] = {}


_last = _Last()

#: Whether processors were paused when this process was last told.
_paused: dict[str, bool] = {}


def _open(name: str) -> _Open:
    """Return the record of the last run, if that goes on, or a new one."""
    last = _last.of.get(name)
    return last if last is not None and last.goes_on else _Open()


class LedgerOfRun:
    """The observer and gate of one run."""

    keeps_rate = True

    def __init__(self, processor: Any) -> None:
        self._name: str = processor.name
        rate = processor.rate
        self._tokens = None if rate is None else Tokens(self._name, rate)
        self._looked_at = self._written_at = -1.0
        self._rows = 0
        self._record: _Open | None = None

    def may_start(self, n: int) -> int:
        """Return how many rows may start: none while the processor is paused."""
        now = time.monotonic()
        if self._looked_at < 0 or now - self._looked_at >= LOOK_EVERY:
            self._looked_at = now
            quietly(self._look, None)
        if _paused.get(self._name):  # without an answer, the last one holds
            raise EndRun("paused")
        if self._tokens is not None:
            n = self._tokens.take(n)
        if n and (self._record is None or now - self._written_at >= WRITE_EVERY):
            self._written_at = now
            self._note()
        return n

    def _look(self) -> None:
        with waiting(RUN_WAIT):
            _paused[self._name] = is_paused(self._name)

    def ended(self, outcomes: Sequence[Outcome]) -> None:
        self._rows += len(outcomes)

    def run(self, event: RunEvent) -> None:
        if event.kind == "ended" and event.report is not None:
            if event.error is not None:
                reconnected(alias())  # the connection's loss may have ended the run
            self._end(event.report, event.error)

    def _note(self) -> None:
        """Record that the run is at work, so that one that is killed has left a trace."""
        record = self._record = self._record or _open(self._name)
        tried = record.tried + self._rows
        quietly(lambda: _write(self._name, record, rows=tried, stopped=""), None)

    def _end(self, report: Report, error: BaseException | None) -> None:
        """Record the end of the run, unless it has found no row, and nothing was wrong."""
        first = report.failures[0].error if report.failures else None
        cause = error or report.error or first
        if self._record is None and cause is None:
            return
        record = self._record or _open(self._name)
        record.counts.update({n: getattr(report, n) for n in (*COUNTS, "to_retry")})
        record.error = describe(cause)[:TEXT] if cause is not None else record.error
        record.ended = time.monotonic()
        _last.of[self._name] = record
        quietly(lambda: _write_end(self._name, record, report.stopped), None)


def _write(name: str, record: _Open, **values: Any) -> None:
    values["seen_at"] = DatabaseNow()
    with waiting(RUN_WAIT):
        # New, or emptied by a person, or by the retention.
        if record.pk is None or not records().filter(pk=record.pk).update(**values):
            began = Later(timedelta(seconds=record.began - time.monotonic()))
            own = {"processor": name, "action": RUN, "by": record.by, "at": began}
            record.pk = records().create(**own, **values).pk


def _write_end(name: str, record: _Open, stopped: str) -> None:
    counts = {name: number for name, number in record.counts.items() if number}
    texts = {"stopped": stopped[:REASON], "error": record.error}
    _write(name, record, rows=record.tried, counts=counts, **texts)
    if record.pk is not None and record.pk % PRUNE_EACH == 0:
        prune()
