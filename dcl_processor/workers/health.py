"""Shows that this process is alive, by a file and to systemd; ends it with a handler that hangs.

A database that does not answer makes no process a dead one: a restart would not help, and all
restarted workers would connect at the same time.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from dcl_processor.engine import calls
from dcl_processor.engine.calls import Limited
from dcl_processor.pending import steady as time
from dcl_processor.report.errors import printable

#: Seconds between two looks.
PACE = 1.0

#: Seconds that a handler has to end in after its ``handler_timeout``, at which it is interrupted.
GRACE = 30

STDERR = 2

#: Characters of the keys of its rows.
LONGEST = 200


class Notifier:
    """Tells systemd the state of this service, by the datagrams of sd_notify(3).

    Only the process that systemd has started sends them, as ``NotifyAccess=main`` requires.
    """

    def __init__(self, address: str) -> None:
        # "@" stands for the zero byte of an address that is in no folder.
        self._address = f"\0{address[1:]}" if address.startswith("@") else address

    @classmethod
    def taken_from(cls, environment: MutableMapping[str, str]) -> Notifier | None:
        """Return what the variables ask for, or ``None`` without systemd.

        They are removed, so that neither the workers nor what the handlers start can take itself
        for the service.
        """
        names = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
        address, *_ = [environment.pop(name, "") for name in names]
        return cls(address) if address else None

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

    def ready(self) -> None:
        """Show that the command has started; raises ``OSError`` if the file cannot be written.

        Also while the database does not answer: systemd would start the service again and again.
        """
        self._write()
        if self.notifier is not None:
            self.notifier.send("READY=1")

    def beat(self) -> None:
        """Show that this process is alive; to be called each second; never raises."""
        with suppress(OSError):  # on a full disk the file gets old
            self._write()
        if self.notifier is not None:
            self.notifier.send(*["STOPPING=1"] * self.is_stopping(), "WATCHDOG=1")

    def close(self) -> None:
        """Remove the file, as the command ends."""
        if self.file is not None:
            with suppress(OSError):
                self.file.unlink()

    def _write(self) -> None:
        """Write the file as a whole, of which a probe must not read half."""
        if self.file is None:
            return
        document = {
            "pid": os.getpid(),
            "processors": [*self.names],
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "troubles": [{"processor": n, "error": why} for n, why in [*self.troubles.items()]],
        }
        # Never through a link, which any user may create in a folder that all may write to.
        new = self.file.with_name(f".{self.file.name}.{os.getpid()}")
        new.unlink(missing_ok=True)
        try:
            with new.open("x", encoding="utf-8") as file:
                file.write(f"{json.dumps(document)}\n")
            new.replace(self.file)
        finally:
            new.unlink(missing_ok=True)


class Monitor:
    """Looks at this process each second, in a thread, until the block ends.

    ``beat`` is called at each look; ``may_end``: whether it may end the process. The thread runs
    only as long as Python runs other threads: a process that is stopped, or whose handler keeps the
    GIL, is shown by what ``beat`` does not do any more.
    """

    def __init__(self, beat: Callable[[], None], *, may_end: bool = True) -> None:
        self._beat, self._may_end = beat, may_end
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._over.set()
        self._thread.join(PACE)

    def _run(self) -> None:
        while not self._over.wait(PACE):
            self._beat()
            if self._may_end:
                end_if_a_handler_hangs()


def end_if_a_handler_hangs() -> None:
    """End this process if a call of a handler was not to be interrupted."""
    now = time.monotonic()
    # Of several on one event loop, the oldest has begun to keep the others from their end.
    for call in sorted([*calls.limited], key=lambda call: call.since):
        if now - call.since > call.limit + GRACE:
            end(call)


def end(call: Limited) -> None:
    """End this process, by a signal that no handler can catch, with a line on stderr."""
    rows = printable(", ".join(map(str, call.pks)))[:LONGEST]
    line = (
        f"{call.label}: row {rows} did not leave its handler within {GRACE} s after "
        f"handler_timeout={call.limit:g}; process {os.getpid()} ends itself\n"
    )
    # Neither through Python's stream, whose lock a handler may hold, nor for longer than a moment:
    # the reader may have stopped.
    writer = threading.Thread(target=os.write, args=(STDERR, line.encode()), daemon=True)
    writer.start()
    writer.join(PACE)
    os.kill(os.getpid(), signal.SIGKILL)
