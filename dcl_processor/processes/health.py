"""Shows outside that the workers of this command are alive: by a file, and to systemd.

Both are refreshed only while every worker is alive. A database that does not answer makes no worker
a dead one: a restart would not help, and all restarted workers would connect at the same time.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dcl_processor.execution import calls
from dcl_processor.pending import steady as time

from . import monitor
from .graceful_stop import Stop
from .news import Beat, Worker, clock
from .visible import Notifier

logger = logging.getLogger("dcl_processor.operations")

#: Seconds that are added to the time that is asked of systemd for the last rows, for their commit.
MARGIN = 10.0

#: Characters of a status: systemd takes no message of more than 4,096 bytes.
LONGEST_STATUS = 900


@dataclass(slots=True)
class Health:
    """The health of a command that runs these processors; without a file and systemd, of no use.

    Only one thread at a time may call it: that of the supervisor's loop, or, where this process
    works itself, the monitor's.
    """

    names: Sequence[str]
    stop: Stop
    #: An absolute path, because a handler may change the working directory.
    file: Path | None = None
    notifier: Notifier | None = None
    #: What keeps processors from being run, by the worker's number and the processor's name.
    troubles: dict[tuple[int | None, str | None], str] = field(default_factory=dict)
    _status: str = ""
    _file_is_old: bool = False
    _is_stopping: bool = False

    @property
    def pace(self) -> float:
        """The seconds between two signs of life."""
        watchdog = None if self.notifier is None else self.notifier.watchdog
        return monitor.PACE if watchdog is None else min(monitor.PACE, watchdog / 2)

    def ready(self) -> None:
        """Show that the command has started; raises ``OSError`` if the file cannot be written.

        Also while the database does not answer: systemd would start the service again and again.
        """
        if self.file is not None:
            write_file(self.file, self._document([]))
        if self.notifier is not None:
            starting = f"STATUS=starting {' and '.join(self.names)}"
            self.notifier.send("READY=1", starting[:LONGEST_STATUS])

    def seen(self, workers: Sequence[Worker]) -> None:
        """Show the state of all workers; to be called in each pace."""
        is_alive = all(worker.is_alive for worker in workers)
        if self.file is not None and is_alive:
            self._refresh(self.file, self._document(workers))
        if self.notifier is not None:
            lines = [*self._changed_status(workers), *self._last_rows(workers)]
            if is_alive and self.notifier.watchdog is not None:
                lines.append("WATCHDOG=1")
            if lines:
                self.notifier.send(*lines)

    def beat(self, beat: Beat) -> None:
        """Take the state of this process, which works itself."""
        state = "works" if beat.call else "waits"
        self.seen([Worker(1, os.getpid(), state, beat.call, not beat.is_overdue)])

    def close(self) -> None:
        """Remove the file, as the command ends."""
        if self.file is not None:
            with suppress(OSError):
                self.file.unlink()
        if self.notifier is not None and not self._is_stopping:
            self.notifier.send("STOPPING=1")

    def _refresh(self, file: Path, document: Mapping[str, Any]) -> None:
        """Write the file again; a full disk is logged once, and the next call tries again."""
        try:
            write_file(file, document)
        except OSError as error:
            if not self._file_is_old:
                message = "%s cannot be written, and gets old although the workers are alive: %s"
                logger.warning(message, file, error)
            self._file_is_old = True
        else:
            self._file_is_old = False

    def _changed_status(self, workers: Sequence[Worker]) -> list[str]:
        status = self._summary(workers)
        if status == self._status:
            return []
        self._status = status
        return [f"STATUS={status[:LONGEST_STATUS]}"]

    def _summary(self, workers: Sequence[Worker]) -> str:
        busy = sorted((each.call for each in workers if each.call), key=lambda call: call.since)
        words = [f"{len(busy)} of {len(workers)} workers at work"]
        if sick := [worker for worker in workers if not worker.is_alive]:
            words.append(f"not alive: {', '.join(f'worker {each.number}' for each in sick)}")
        words += [f"oldest: {oldest.label}, {oldest}" for oldest in busy[:1]]
        words += [f"waiting: {why}" for why in [*self.troubles.values()][:1]]
        return "; ".join(words)

    def _last_rows(self, workers: Sequence[Worker]) -> list[str]:
        """Say once that the service stops, and ask for the time that its last rows may take."""
        if not self.stop.is_set():
            return []
        lines = [] if self._is_stopping else ["STOPPING=1"]
        self._is_stopping = True
        busy = [each.call for each in workers if each.call is not None]
        ends = [call.since + call.limit + calls.GRACE for call in busy if call.limit is not None]
        left = max(ends, default=0.0) - time.monotonic()
        # Bounded by the limit: without one, the service's own TimeoutStopSec decides.
        return [*lines, f"EXTEND_TIMEOUT_USEC={int((left + MARGIN) * 1e6)}"] if left > 0 else lines

    def _document(self, workers: Sequence[Worker]) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "processors": [*self.names],
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "workers": [_worker(each) for each in workers],
            "troubles": [
                {"worker": worker, "processor": name, "error": why}
                for (worker, name), why in [*self.troubles.items()]
            ],
        }


def _worker(worker: Worker) -> dict[str, Any]:
    shown: dict[str, Any] = {"worker": worker.number, "pid": worker.pid, "state": worker.state}
    if (call := worker.call) is not None:
        shown |= {"processor": call.label, "rows": call.rows, "row_count": call.number}
        shown |= {"since": clock(call.since), "handler_timeout": call.limit}
    return shown


def write_file(path: Path, document: Mapping[str, Any]) -> None:
    """Write the file as a whole, of which a probe must not read half; raises ``OSError``."""
    # Under another name first, and never through a link, which any user may create in a folder that
    # all may write to.
    new = path.with_name(f".{path.name}.{os.getpid()}")
    with suppress(OSError):
        new.unlink()  # which a process that had this ID may have left
    try:
        opened = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        with os.fdopen(opened, "w", encoding="utf-8") as file:
            file.write(f"{json.dumps(document)}\n")
        new.replace(path)
    except OSError:
        with suppress(OSError):
            new.unlink()
        raise
