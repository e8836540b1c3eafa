"""A real SMTP server in this process that stores every mail it receives."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable
from dataclasses import dataclass
from email.parser import BytesHeaderParser
from typing import Self

from aiosmtpd.controller import Controller
from aiosmtpd.smtp import SMTP, Envelope, Session

HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class DeliveredMail:
    """The headers and recipient of one delivered mail."""

    message_id: str
    recipient: str
    order_number: int | None


class Mailbox:
    """Receive mail on a free port for as long as the `with` block lasts."""

    def __init__(self) -> None:
        self.mails: list[DeliveredMail] = []
        self.sessions = 0
        # Bound here and handed over, so that no other program can get the port in between.
        # The protocol is named because only then asyncio turns off the delay of small packets,
        # which would delay every mail by 40 ms.
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._socket.bind((HOST, 0))
        self.port: int = self._socket.getsockname()[1]
        self._server = _Server(self, self._socket, self.port)

    @property
    def url(self) -> str:
        """Where to send mail, in the format of EMAIL_URL."""
        return f"smtp://{HOST}:{self.port}"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.stop(no_assert=True)
        self._socket.close()

    async def handle_EHLO(  # noqa: N802 - the name is aiosmtpd's
        self,
        _server: SMTP,
        session: Session,
        _envelope: Envelope,
        hostname: str,
        responses: list[str],
    ) -> list[str]:
        """Count a session: a client sends EHLO once, when it has connected."""
        session.host_name = hostname
        self.sessions += 1
        return responses

    async def handle_DATA(  # noqa: N802 - the name is aiosmtpd's
        self, _server: SMTP, _session: Session, envelope: Envelope
    ) -> str:
        """Store a mail; aiosmtpd calls this before it confirms the mail to the sender."""
        content = envelope.content or b""
        headers = BytesHeaderParser().parsebytes(
            content if isinstance(content, bytes) else content.encode()
        )
        order = headers.get("X-Order", "")
        self.mails.append(
            DeliveredMail(
                message_id=headers.get("Message-ID", ""),
                recipient=", ".join(envelope.rcpt_tos),
                order_number=int(order) if order.isdecimal() else None,
            )
        )
        return "250 OK"


class _Server(Controller):
    """aiosmtpd's server on a socket that is already bound."""

    def __init__(self, mailbox: Mailbox, bound: socket.socket, port: int) -> None:
        # A fixed name avoids the look-up of this machine's name, which can take seconds.
        super().__init__(mailbox, hostname=HOST, port=port, server_hostname="localhost")
        self._bound = bound

    def _create_server(self) -> Awaitable[asyncio.AbstractServer]:
        return self.loop.create_server(self._factory_invoker, sock=self._bound)
