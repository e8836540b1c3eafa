"""The ledger of a process: its runs and commands, and the thread that reads and writes for them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from dcl_processor.operator.diagnosis import describe
from dcl_processor.oversight import Progress
from dcl_processor.pending import steady as time
from dcl_processor.report.report import Report
from dcl_processor.sql.errors import may_pass

from .desk import POLL, Desk, UnreachableError, is_inline
from .models import TEXT, alias, ensure
from .orders import Orders, name_of, read_orders
from .overseer import RunOverseer
from .recording import Work, looked
from .records import prune
from .tokens import Grant, Tokens, take

if TYPE_CHECKING:
    from dcl_processor.options.options import Definition
    from dcl_processor.report.counters import Counters

#: Seconds between two notes of a process that it has looked for rows of a processor.
LOOK_EVERY = 5.0

#: Seconds between two deletions of old records by one process.
PRUNE_EVERY = 600.0

#: Seconds for which a run tries to write the end of its record, and seconds between two tries.
AT_ONCE_FOR, AGAIN_AFTER = 5.0, 0.1


class Record:
    """The record of one start: a work for each of its processors."""

    def __init__(self, ledger: Ledger, works: dict[str, Work]) -> None:
        self.works = works
        self._ledger = ledger

    def progress(self, worker: int, name: str, progress: Progress) -> None:
        """Take note of what a worker of the command has done."""
        self.works[name].progress(worker, progress)

    def worker_died(self, worker: int, why: str) -> None:
        """Take note that a worker has died; ``why``: a sentence for people."""
        for work in self.works.values():
            work.worker_died(worker, why[:TEXT])

    def ended(self, name: str, report: Report) -> None:
        """Take note of the report of all workers of the command."""
        work = self.works[name]
        work.stopped = report.stopped
        work.error = _error(report, None) or work.error

    def resumed(self) -> Collection[str]:
        """Return the processors whose pause has ended since the last call."""
        wake = []
        for name, work in self.works.items():
            if (orders := self._ledger.orders.get(name)) is None:
                continue
            before, work.orders = work.orders, orders
            if before is not None and before.is_paused and not orders.is_paused:
                wake.append(name)
        return wake


class Ledger:
    """What ``dcl_processor.oversight`` asks; one for a process, whose threads share it."""

    def __init__(self) -> None:
        self.desk = Desk(self._tick)
        #: What was read last, by the processors' names.
        self.orders: dict[str, Orders] = {}
        self._lock = threading.Lock()
        self._records: list[Record] = []
        self._tokens: dict[tuple[str, float], Tokens] = {}
        self._looked: dict[str, float] = {}
        self._pruned = 0.0
        self._own = threading.local()

    # --- what runs and commands call

    def of_run(
        self, processor: Definition[Any], counts: Counters, *, hands_out: bool
    ) -> RunOverseer:
        """Return the overseer of a run that begins; a hand-out is not recorded."""
        name = name_of(processor.name)
        command: Record | None = getattr(self._own, "command", None)
        is_own = command is None or name not in command.works
        if is_own or command is None:
            command = self._begin("code", [name])
        elif (orders := self.orders.get(name)) is None or orders.age > 2 * POLL:
            self.read([name])
        if processor.rate is not None:
            with suppress(UnreachableError):
                self.desk.call(lambda: ensure(name))
        work = command.works[name]
        overseer = RunOverseer(
            self, processor, counts, work, command if is_own else None, hands_out=hands_out
        )
        if not hands_out:
            work.begin(overseer)
        return overseer

    @contextmanager
    def command(self, kind: str, names: Collection[str]) -> Iterator[Record]:
        """Record a command, whose runs this thread makes in the block."""
        record = self._own.command = self._begin(kind, names)
        try:
            yield record
        except BaseException as error:
            for work in record.works.values():
                work.error = kept(error)
            raise
        finally:
            self._own.command = None
            self.end_record(record)
            if not self._records:
                self.desk.close()

    @contextmanager
    def worker(
        self, names: Collection[str], send: Callable[[str, Progress], None]
    ) -> Iterator[Record]:
        """Send what this process does to its parent."""
        with self.command("worker", names) as record:
            for work in record.works.values():
                work.send = send
            yield record

    def connections(self, using: str) -> int:
        """Return the connections of the alias that a run needs beside its own."""
        return int(alias() == using)

    # --- what overseers call

    def tokens_of(self, processor: Definition[Any]) -> Tokens:
        """Return the tokens of a processor's rate, which the runs of this process share."""
        name, rate = processor.name, processor.rate
        assert rate is not None

        def ask(rows: int) -> Grant:
            return self.desk.call(lambda: take(name, rate, rows))

        with self._lock:
            return self._tokens.setdefault((name, rate), Tokens(ask))

    def end_run(self, overseer: RunOverseer, report: Report, error: BaseException | None) -> None:
        """Take note of the end of a run."""
        work = overseer.work
        work.stopped = report.stopped
        work.error = _error(report, error) or work.error
        if report.stopped != "paused":
            self._note_look(work.processor)
        if overseer.record is not None:
            self.end_record(overseer.record)
        elif work.send is not None:
            work.flush()  # before the report, so that the parent has all when it gets that

    def end_record(self, record: Record) -> None:
        """Write a record for the last time."""
        with self._lock:
            if record in self._records:
                self._records.remove(record)

        works = [*record.works.values()]
        for work in works:
            if work.send is not None:
                work.flush(is_last=True)  # to the parent, which writes the row
        works = [work for work in works if work.send is None]
        if any(work.done() or work.has_row or work.error for work in works):
            self._write_ends(works)

    def _write_ends(self, works: list[Work]) -> None:
        """Write the ends of records; one that cannot be written is shown as lost."""
        until = time.monotonic() + AT_ONCE_FOR
        while True:
            try:
                self.desk.call(lambda: self._flush(works))
            except UnreachableError as error:
                cause = error.__cause__
                if cause is None or not may_pass(cause) or time.monotonic() > until or is_inline():
                    return
                # The connection may have been cut, or the server restart.
                time.sleep(AGAIN_AFTER)
            else:
                return

    def _flush(self, works: list[Work]) -> None:
        for work in works:
            work.flush(is_last=True)
        self._prune_now_and_then()

    def read(self, names: Collection[str]) -> None:
        """Read the orders of processors now; without an answer the last ones stay."""
        with suppress(UnreachableError):
            self.desk.call(lambda: self.orders.update(read_orders(names)))

    # --- inside

    def _begin(self, kind: str, names: Collection[str]) -> Record:
        self.read(names)
        record = Record(self, {name: Work(name, kind, self.orders.get(name)) for name in names})
        with self._lock:
            self._records.append(record)
        return record

    def _tick(self) -> bool:
        """Read the orders, and write what has changed; return whether there is anything to do."""
        with self._lock:
            works = [work for record in self._records for work in record.works.values()]
        names = {work.processor for work in works}
        if names:
            self.orders.update(read_orders(names))
        for work in works:
            work.flush()
        if names:
            self._prune_now_and_then()
        return bool(names)

    def _note_look(self, name: str) -> None:
        now = time.monotonic()
        if now - self._looked.get(name, -LOOK_EVERY) < LOOK_EVERY:
            return
        self._looked[name] = now
        with suppress(UnreachableError):
            self.desk.call(lambda: looked(name))

    def _prune_now_and_then(self) -> None:
        now = time.monotonic()
        if self._pruned and now - self._pruned < PRUNE_EVERY:
            return
        self._pruned = now
        prune()


def _error(report: Report, error: BaseException | None) -> str:
    first = report.failures[0].error if report.failures else None
    return kept(error or report.error or first)


_ledger: Ledger | None = None
_making = threading.Lock()


def _forget() -> None:
    global _ledger  # noqa: PLW0603  # a forked process has none of its parent's threads
    _ledger = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def ledger() -> Ledger:
    """Return the ledger of this process."""
    global _ledger  # noqa: PLW0603  # a process has one
    with _making:
        if _ledger is None:
            _ledger = Ledger()
        return _ledger


def kept(error: BaseException | None) -> str:
    """Return the text of an error that the ledger keeps, which is masked and in one line."""
    return "" if error is None else describe(error)[:TEXT]
