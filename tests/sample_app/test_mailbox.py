"""The mail server of the demo takes in real mail and remembers it."""

from __future__ import annotations

import smtplib

import pytest
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
