"""The record of a command, or of a call of ``run()``: added up in memory, and written now and then.

The counts of a run are those that it counts anyway; another thread reads them once a second. So a
row costs nothing here. A worker that a command has started sends its counts to the command's own
process, which alone writes the row.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

from dcl_processor.oversight import Progress
from dcl_processor.pending import steady as time
from dcl_processor.pending.clock import DatabaseNow, Later
from dcl_processor.report.report import COUNTS
from dcl_processor.worker import host

from .models import Look, RecordedRun, alias

if TYPE_CHECKING:
    from .orders import Orders
    from .overseer import RunOverseer

#: The counts that are kept.
KEPT = (*COUNTS, "to_retry")

#: Seconds between two writes of a row of which nothing has changed.
HEARTBEAT = 10.0

#: Seconds after which a run that has counted nothing yet is shown: its first handler takes long.
SHOWN_AFTER = 1.0


@dataclass(slots=True)
class Work:
    """What one start has done for one processor."""

    processor: str
    kind: str
    #: The orders that were followed last; ``None``: they could not be read.
    orders: Orders | None = None
    id: UUID = field(default_factory=uuid4)
    started: float = field(default_factory=time.monotonic)
    error: str = ""
    #: Why it ended, if it has.
    stopped: str = ""
    #: Where progress is sent; ``None``: this process writes the row.
    send: Callable[[str, Progress], None] | None = None
    #: Whether its row was inserted, or may have been.
    has_row: bool = False
    #: The runs that are under way, with their begin; and what those have done that have ended.
    live: list[tuple[float, RunOverseer]] = field(default_factory=list)
    _ended: Counter[str] = field(default_factory=Counter)
    #: What each worker has sent last, with the counts of all that it has sent.
    _workers: dict[int, Progress] = field(default_factory=dict)
    #: Workers that have died, and that have no successor yet.
    _died: set[int] = field(default_factory=set)
    _sent: Counter[str] = field(default_factory=Counter)
    _written: Any = None
    _written_at: float = 0.0
    #: The run's thread adds what the ledger's thread reads.
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def at_work(self) -> bool:
        """Whether a run is under way."""
        return bool(self._begun())

    def _begun(self) -> list[float]:
        """Return when the runs that are under way have begun."""
        with self._lock:
            own = [since for since, _ in self.live]
            return own + [each.since for each in self._living() if each.since is not None]

    def _living(self) -> list[Progress]:
        """Return what the workers have sent that have not ended."""
        workers = self._workers.items()
        return [each for number, each in workers if not (each.is_last or number in self._died)]

    def begin(self, run: RunOverseer) -> None:
        """Take note of a run that begins."""
        self.live.append((time.monotonic(), run))

    def end(self, run: RunOverseer) -> None:
        """Take note of a run that has ended."""
        with self._lock:
            self.live = [each for each in self.live if each[1] is not run]
            self._ended.update(_counted(run))

    def worker_died(self, worker: int, why: str) -> None:
        """Take note that a worker of the command has died, and has no row at work any more."""
        with self._lock:
            last = self._workers.get(worker)
            if last is not None and last.is_last:
                return  # it has done all of its work
            self._died.add(worker)
        self.error = why

    def progress(self, worker: int, progress: Progress) -> None:
        """Take note of what a worker of the command has done since it has sent the last one."""
        with self._lock:
            self._died.discard(worker)
            # Perhaps that of a worker that has died, in whose place this one is.
            before = self._workers.get(worker)
            counts = Counter({} if before is None else before.counts)
            counts.update(progress.counts)
            self._workers[worker] = replace(progress, counts=counts)
        self.error = progress.error or self.error

    def done(self) -> Counter[str]:
        """Return what all runs and workers have done."""
        with self._lock:
            total = Counter(self._ended)
            for _, run in self.live:
                total.update(_counted(run))
            for each in self._workers.values():
                total.update(each.counts)
        return total

    def flush(self, *, is_last: bool = False) -> None:
        """Write what has changed; the thread of the ledger calls it, at most once a second."""
        if self.send is not None:
            with self._lock:
                self._send(self.send, is_last=is_last)
            return
        done, now = self.done(), time.monotonic()
        if not self.has_row and not self._is_worth_a_row(done, now):
            return
        what = done, self.at_work, self.error, is_last
        if what == self._written and now - self._written_at < HEARTBEAT:
            return
        values = self._values(done, is_last=is_last)
        table = RecordedRun.objects.using(alias())
        if not self.has_row or not table.filter(pk=self.id).update(**values):
            # New, or emptied by a person, or by the retention. Noted before the statement: if its
            # answer is lost, the next write finds out whether the row is there.
            self.has_row = True
            started = Later(timedelta(seconds=self.started - now))
            own = {"processor": self.processor, "kind": self.kind, "host": host()}
            table.create(pk=self.id, **own, pid=os.getpid(), started_at=started, **values)
        self._written, self._written_at = what, now

    def _send(self, send: Callable[[str, Progress], None], *, is_last: bool) -> None:
        # The thread of the ledger may come with what it has begun before the end.
        if not is_last and self._written is not None and self._written.is_last:
            return
        since, done = min(self._begun(), default=None), self.done()
        state = Progress(os.getpid(), {}, since, self.error, is_last)
        if (new := done - self._sent) or state != self._written:
            self._written, self._sent = state, done
            send(self.processor, replace(state, counts=new))

    def _is_worth_a_row(self, done: Counter[str], now: float) -> bool:
        did_something = any(done[name] for name in COUNTS if name != "stale")
        is_long = any(now - since >= SHOWN_AFTER for since in self._begun())
        return did_something or is_long or bool(self.error)

    def _values(self, done: Counter[str], *, is_last: bool) -> dict[str, Any]:
        values: dict[str, Any] = {
            "counts": {name: done[name] for name in KEPT},
            "heartbeat_at": DatabaseNow(),
            "at_work": self.at_work and not is_last,
            "error": self.error,
            "workers": [
                {"worker": number, "pid": each.pid, **each.counts}
                for number, each in sorted(self._workers.items())
            ],
        }
        if is_last:
            values |= {"finished_at": DatabaseNow(), "stopped": self._why_it_ended()}
        return values

    def _why_it_ended(self) -> str:
        # What a dead worker would have found is not known.
        is_known = self.stopped not in {"", "drained", "busy"} or not self._died
        return (self.stopped or "drained") if is_known else "failures"


def _counted(run: RunOverseer) -> dict[str, int]:
    """Return what a run has done so far."""
    # By name, because it may add a name meanwhile.
    return {name: number for name in KEPT if (number := run.counts.get(name, 0))}


def looked(processor: str) -> None:
    """Take note that this host has looked for rows of a processor."""
    Look.objects.using(alias()).update_or_create(
        processor=processor, host=host(), defaults={"looked_at": DatabaseNow()}
    )
