"""Shows outside that the workers of this command are alive: by a file, and to systemd.

Both are refreshed only while every worker is alive. A database that does not answer makes no worker
a dead one: a restart would not help, and all restarted workers would connect at the same time.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dcl_processor.report.errors import described
from dcl_processor.workers import monitor
from dcl_processor.workers.visible import operations

#: Characters of a status: systemd takes no message of more than 4,096 bytes.
LONGEST_STATUS = 900


class Notifier:
    """Tells systemd the state of this service, by the datagrams of sd_notify(3).

    Only the process that systemd has started sends them, as ``NotifyAccess=main`` requires.
    ``watchdog``: seconds within which it has to be heard of.
    """

    def __init__(self, address: str, watchdog: float | None = None) -> None:
        # "@" stands for the zero byte of an address that is in no folder.
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self.watchdog = watchdog

    @classmethod
    def taken_from(cls, environment: MutableMapping[str, str]) -> Notifier | None:
        """Return what the variables ask for, or ``None`` without systemd.

        They are removed, so that neither the workers nor what the handlers start can take itself
        for the service.
        """
        names = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
        address, microseconds, pid = (environment.pop(name, "") for name in names)
        if not address.startswith(("/", "@")):
            return None
        is_ours = pid in ("", str(os.getpid()))
        wants_watchdog = is_ours and microseconds.isdecimal() and int(microseconds) > 0
        return cls(address, int(microseconds) / 1e6 if wants_watchdog else None)

    def send(self, *lines: str) -> None:
        """Send assignments such as ``"READY=1"``, in one datagram; never waits, and never raises.

        A service whose manager does not listen has nothing better to do than to go on.
        """
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.sendto("\n".join(lines).encode(), self._address)


@dataclass(slots=True)
class Health:
    """The health of a command that runs these processors; without a file and systemd, of no use."""

    names: Sequence[str]
    #: Whether the command is to stop.
    is_stopping: Callable[[], bool]
    #: An absolute path, because a handler may change the working directory.
    file: Path | None = None
    notifier: Notifier | None = None
    #: What keeps processors from being run, by their names.
    troubles: dict[str, str] = field(default_factory=dict)
    _said: str = ""
    _is_old: bool = False

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
            write_file(self.file, self._document(()))
        if self.notifier is not None:
            self.notifier.send("READY=1", self._status(())[0])

    def beat(self, workers: Sequence[Mapping[str, Any]] = (), *, is_alive: bool = True) -> None:
        """Show that this process is alive, and its workers; to be called in each pace.

        ``workers``: the documents of other processes, if they do the work.
        """
        if self.file is not None and is_alive:
            self._refresh(self.file, self._document(workers))
        if self.notifier is not None:
            lines = self._status(workers)
            if is_alive and self.notifier.watchdog is not None:
                lines.append("WATCHDOG=1")
            if lines:
                self.notifier.send(*lines)

    def close(self) -> None:
        """Remove the file, as the command ends."""
        if self.file is not None:
            with suppress(OSError):
                self.file.unlink()

    def _refresh(self, file: Path, document: Mapping[str, Any]) -> None:
        """Write the file again; a full disk is logged once, and the next call tries again."""
        try:
            write_file(file, document)
        except OSError as error:
            if not self._is_old:
                message = "%s cannot be written, and gets old although the workers are alive: %s"
                operations.warning(message, file, described(error))
            self._is_old = True
        else:
            self._is_old = False

    def _status(self, workers: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return what systemd has not heard yet."""
        words = [f"{'stopping' if self.is_stopping() else 'running'} {' and '.join(self.names)}"]
        if sick := [str(each["worker"]) for each in workers if not each["is_alive"]]:
            words.append(f"not alive: worker {', '.join(sick)}")
        words += [f"waiting: {each['error']}" for each in self._troubles(workers)[:1]]
        status = "; ".join(words)
        if status == self._said:
            return []
        is_first = self.is_stopping() and not self._said.startswith("stopping")
        self._said = status
        return [f"STATUS={status[:LONGEST_STATUS]}", *(["STOPPING=1"] if is_first else [])]

    def _troubles(self, workers: Sequence[Mapping[str, Any]]) -> list[Any]:
        own = [{"processor": name, "error": why} for name, why in [*self.troubles.items()]]
        return own + [
            {"worker": each["worker"], **trouble}
            for each in workers
            for trouble in each["troubles"]
        ]

    def _document(self, workers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "processors": [*self.names],
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "workers": [
                {name: each[name] for name in ("worker", "pid", "is_alive")} for each in workers
            ],
            "troubles": self._troubles(workers),
        }


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
