"""Tells systemd how a service is, by the datagrams of sd_notify(3).

Only the process that systemd has started sends them, as ``NotifyAccess=main`` requires. It removes
the variables from its environment, so that neither the workers nor what the handlers start can take
itself for the service.
"""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping
from contextlib import suppress


class Notifier:
    """Sends the state of this service; ``watchdog``: seconds within which it has to be heard of."""

    def __init__(self, address: str, watchdog: float | None = None) -> None:
        # "@" stands for the zero byte of an address that is in no folder.
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self.watchdog = watchdog

    @classmethod
    def taken_from(cls, environment: MutableMapping[str, str]) -> Notifier | None:
        """Remove the variables, and return what they ask for; ``None`` without systemd."""
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
