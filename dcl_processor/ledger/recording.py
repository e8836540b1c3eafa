"""The record of a command, or of a call of ``run()``: added up in memory, and written now and then.

The counts of a run are those that it counts anyway; another thread reads them once a second. So a
row costs nothing here. A worker that a command has started sends its counts to the command's own
process, which alone writes the row.
"""

from __future__ import annotations

import os
import socket
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

from django.db.models import QuerySet

from dcl_processor import steady as time
from dcl_processor.clock import DatabaseNow, Later
from dcl_processor.oversight import Progress
from dcl_processor.report import COUNTS

from .models import HOST, Look, RecordedRun
from .tables import alias

if TYPE_CHECKING:
    from dcl_processor.runner.counters import Counters

#: The counts that are kept.
KEPT = (*COUNTS, "to_retry")

#: Seconds between two writes of a row of which nothing has changed.
HEARTBEAT = 10.0

#: Seconds after which a run that has counted nothing yet is shown: its first handler takes long.
SHOWN_AFTER = 1.0


@dataclass(slots=True)
class Done:
    """What runs and workers have done: counts, the seconds of handlers, those of the slowest."""

    counts: Counter[str] = field(default_factory=Counter)
    handler_seconds: float = 0.0
    slowest: float = 0.0

    def add(self, other: Counters | Progress | Done) -> None:
        """Add what another one has done."""
        # By name, because a run may add a name meanwhile.
        self.counts.update({name: number for name in KEPT if (number := other.counts.get(name, 0))})
        self.handler_seconds += other.handler_seconds
        self.slowest = max(self.slowest, other.slowest)


@dataclass(slots=True)
class Work:
    """What one start has done for one processor."""

    processor: str
    kind: str
    #: The order to stop that came last before the start; ``None``: it could not be read.
    stops: int | None = None
    run_nows: int | None = None
    was_paused: bool = False
    seen: int = 0
    id: UUID = field(default_factory=uuid4)
    started: float = field(default_factory=time.monotonic)
    error: str = ""
    #: Why it ended, if it has.
    stopped: str = ""
    #: Where progress is sent; ``None``: this process writes the row.
    send: Callable[[str, Progress], None] | None = None
    #: Runs that have ended, and those under way, with their begin.
    _ended: Done = field(default_factory=Done)
    _live: list[tuple[float, Counters | Done]] = field(default_factory=list)
    _workers: dict[int, Progress] = field(default_factory=dict)
    #: What workers had done that have a successor.
    _workers_before: dict[int, Done] = field(default_factory=dict)
    #: Workers that have died, and that have no successor yet.
    _died: set[int] = field(default_factory=set)
    #: Whether its row was inserted, or may have been.
    has_row: bool = False
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
            own = [since for since, _ in self._live]
            workers = [each.since for each in self._living() if each.since is not None]
        return own + workers

    def _living(self) -> list[Progress]:
        """Return what the workers have sent that have not ended."""
        workers = self._workers.items()
        return [each for number, each in workers if not (each.is_last or number in self._died)]

    def note_seen(self, seen: int) -> None:
        """Take note of the newest order that this process has seen.

        The workers of the command, while there are any, count instead of this process.
        """
        with self._lock:
            self.seen = min([each.seen for each in self._living()], default=seen)

    def begin(self, counts: Counters | Done) -> None:
        """Take note of a run that begins."""
        self._live.append((time.monotonic(), counts))

    def end(self, counts: Counters | Done) -> None:
        """Take note of a run that has ended."""
        with self._lock:
            for each in [each for each in self._live if each[1] is counts]:
                self._live.remove(each)
            self._ended.add(counts)

    def worker_died(self, worker: int, why: str) -> None:
        """Take note that a worker of the command has died, and has no row at work any more."""
        with self._lock:
            last = self._workers.get(worker)
            if last is not None and last.is_last:
                return  # it has done all of its work
            self._died.add(worker)
        self.error = why
        self.note_seen(self.seen)

    def progress(self, worker: int, progress: Progress) -> None:
        """Take note of what a worker of the command has done since its start."""
        with self._lock:
            self._died.discard(worker)
            before = self._workers.get(worker)
            if before is not None and before.pid != progress.pid:
                self._workers_before.setdefault(worker, Done()).add(before)
            self._workers[worker] = progress
        self.error = progress.error or self.error
        self.note_seen(progress.seen)

    def done(self) -> Done:
        """Return what all runs and workers have done."""
        total = Done()
        with self._lock:
            live = [counts for _, counts in self._live]
            before, workers = self._workers_before.values(), self._workers.values()
            for each in (self._ended, *live, *before, *workers):
                total.add(each)
        return total

    def flush(self, *, is_last: bool = False) -> None:
        """Write what has changed; the thread of the ledger calls it, at most once a second."""
        if self.send is not None:
            with self._lock:
                self._send(is_last=is_last)
            return
        done, now = self.done(), time.monotonic()
        if not self.has_row and not self._is_worth_a_row(done, now):
            return
        what = done.counts, self.seen, self.at_work, self.error, is_last
        if what == self._written and now - self._written_at < HEARTBEAT:
            return
        values = self._values(done, is_last=is_last)
        table = RecordedRun.objects.using(alias())
        if not self.has_row or not table.filter(pk=self.id).update(**values):
            # New, or emptied by a person, or by the retention.
            self._insert(table, values, now)
        self._written, self._written_at = what, now

    def _insert(self, table: QuerySet[RecordedRun], values: dict[str, Any], now: float) -> None:
        # Before the statement: if its answer is lost, the next write finds out whether it is there.
        self.has_row = True
        table.create(
            pk=self.id,
            processor=self.processor,
            kind=self.kind,
            host=host(),
            pid=os.getpid(),
            started_at=Later(timedelta(seconds=self.started - now)),
            **values,
        )

    def _send(self, *, is_last: bool) -> None:
        # The thread of the ledger may come with what it has begun before the end.
        if not is_last and isinstance(self._written, Progress) and self._written.is_last:
            return
        since = min(self._begun(), default=None)
        done = self.done()
        times = {"handler_seconds": done.handler_seconds, "slowest": done.slowest}
        counts = dict(done.counts)
        what = Progress(os.getpid(), counts, since, self.seen, self.error, is_last, **times)
        if what != self._written and self.send is not None:
            self._written = what
            self.send(self.processor, what)

    def _is_worth_a_row(self, done: Done, now: float) -> bool:
        did_something = any(done.counts[name] for name in COUNTS if name != "stale")
        is_long = any(now - since >= SHOWN_AFTER for since in self._begun())
        return did_something or is_long or bool(self.error)

    def _values(self, done: Done, *, is_last: bool) -> dict[str, Any]:
        values: dict[str, Any] = {
            **{name: done.counts[name] for name in KEPT},
            "handler_seconds": done.handler_seconds,
            "slowest": done.slowest,
            "heartbeat_at": DatabaseNow(),
            "seen": self.seen,
            "at_work": self.at_work and not is_last,
            "error": self.error,
            "workers": self._documents(),
        }
        if is_last:
            values |= {"finished_at": DatabaseNow(), "stopped": self._why_it_ended()}
        return values

    def _why_it_ended(self) -> str:
        # What a dead worker would have found is not known.
        is_known = self.stopped not in {"", "drained", "busy"} or not self._died
        return (self.stopped or "drained") if is_known else "failures"

    def _documents(self) -> list[dict[str, Any]]:
        return [
            {
                "worker": number,
                "pid": each.pid,
                **(Counter(each.counts) + self._workers_before.get(number, Done()).counts),
            }
            for number, each in sorted(self._workers.items())
        ]


def looked(processor: str) -> None:
    """Take note that this host has looked for rows of a processor."""
    Look.objects.using(alias()).update_or_create(
        processor=processor, host=host(), defaults={"looked_at": DatabaseNow()}
    )


def host() -> str:
    """Return the name of this host, as the ledger keeps it."""
    return socket.gethostname()[:HOST]
