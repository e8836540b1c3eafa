"""The mail server of the demo takes in real mail and remembers it."""

from __future__ import annotations

import smtplib
import socket
from contextlib import suppress

import pytest
from aiosmtpd.smtp import SMTP, Envelope, Session
from django.core.mail import EmailMessage

from sample_app.shop.demo.mailbox import HOST, DeliveredMail, Mailbox


def test_remembers_what_a_mail_says_of_itself(mailbox: Mailbox) -> None:
    headers = {"X-Order": "10248", "Message-ID": "<one@example.com>"}
    EmailMessage("Hello", "there", "a@example.com", ["b@example.com"], headers=headers).send()

    assert mailbox.mails == [DeliveredMail("<one@example.com>", "b@example.com", 10248)]


@pytest.mark.parametrize("header", ["", "X-Order: many\r\n", "X-Order: -1\r\n"])
def test_takes_a_mail_that_names_no_order(mailbox: Mailbox, header: str) -> None:
    with smtplib.SMTP(HOST, mailbox.port, local_hostname="localhost") as client:
        client.sendmail("a@example.com", ["b@example.com"], f"{header}\r\nhello\r\n")

    assert mailbox.mails == [DeliveredMail("", "b@example.com", None)]


def test_answers_without_the_delay_of_small_packets() -> None:
    delays = []

    class Watching(Mailbox):
        """Asks the connection's socket whether it sends small packets at once."""

        async def handle_DATA(self, server: SMTP, session: Session, envelope: Envelope) -> str:  # noqa: N802
            assert server.transport is not None
            connection = server.transport.get_extra_info("socket")
            delays.append(not connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            return await super().handle_DATA(server, session, envelope)

    with Watching() as mailbox, smtplib.SMTP(HOST, mailbox.port, local_hostname="x") as client:
        client.sendmail("a@example.com", ["b@example.com"], "hello\r\n")

    assert delays == [False]


def test_a_closed_mailbox_takes_nothing() -> None:
    with Mailbox() as mailbox:
        pass
    # Another program may have its port by now.
    with suppress(OSError), smtplib.SMTP(HOST, mailbox.port, local_hostname="localhost") as client:
        client.ehlo()
    assert mailbox.sessions == 0
