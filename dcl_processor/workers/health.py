"""Shows outside that the workers of this command are alive: by a file, and to systemd.

Both are refreshed only while every worker is alive. A database that does not answer makes no worker
a dead one: a restart would not help, and all restarted workers would connect at the same time.
"""

from __future__ import annotations

import json
import math
import os
import socket
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dcl_processor.workers import monitor


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
        if not address:
            return None
        wants_watchdog = microseconds and pid in ("", str(os.getpid()))
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
    """The health of a command that runs these processors."""

    names: Sequence[str]
    #: Whether the command is to stop.
    is_stopping: Callable[[], bool]
    #: An absolute path, because a handler may change the working directory.
    file: Path | None = None
    notifier: Notifier | None = None
    #: What keeps processors from being run, by their names.
    troubles: dict[str, str] = field(default_factory=dict)

    @property
    def is_shown(self) -> bool:
        """Whether there is a file, or systemd."""
        return self.file is not None or self.notifier is not None

    @property
    def pace(self) -> float:
        """The seconds between two signs of life."""
        watchdog = None if self.notifier is None else self.notifier.watchdog
        return min(monitor.PACE, (watchdog or math.inf) / 2)

    def ready(self) -> None:
        """Show that the command has started; raises ``OSError`` if the file cannot be written.

        Also while the database does not answer: systemd would start the service again and again.
        """
        if self.file is not None:
            write_file(self.file, self._document(()))
        if self.notifier is not None:
            self.notifier.send("READY=1")

    def beat(self, workers: Sequence[Mapping[str, Any]] = ()) -> None:
        """Show that this process is alive, and its workers; to be called in each pace.

        ``workers``: the documents of other processes, if they do the work. While one of them is not
        alive, the file gets old, and so it does on a full disk.
        """
        is_alive = all(each["is_alive"] for each in workers)
        if self.file is not None and is_alive:
            with suppress(OSError):
                write_file(self.file, self._document(workers))
        if self.notifier is not None:
            lines = ["STOPPING=1"] * self.is_stopping() + ["WATCHDOG=1"] * is_alive
            self.notifier.send(*lines)

    def close(self) -> None:
        """Remove the file, as the command ends."""
        if self.file is not None:
            with suppress(OSError):
                self.file.unlink()

    def _document(self, workers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        own = [{"processor": name, "error": why} for name, why in [*self.troubles.items()]]
        theirs = [
            {"worker": each["worker"], **trouble}
            for each in workers
            for trouble in each["troubles"]
        ]
        return {
            "pid": os.getpid(),
            "processors": [*self.names],
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "workers": [
                {name: each[name] for name in ("worker", "pid", "is_alive")} for each in workers
            ],
            "troubles": own + theirs,
        }


def write_file(path: Path, document: Mapping[str, Any]) -> None:
    """Write the file as a whole, of which a probe must not read half; raises ``OSError``."""
    # Under another name first, and never through a link, which any user may create in a folder that
    # all may write to.
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.unlink(missing_ok=True)  # which a process that had this ID may have left
    try:
        with new.open("x", encoding="utf-8") as file:
            file.write(f"{json.dumps(document)}\n")
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
