"""django-mailer: ``send_all()``, with an e-mail backend that hands each message to the handler."""

from __future__ import annotations

from collections.abc import Sequence

from django.core.mail import EmailMessage, get_connection
from django.core.mail.backends.base import BaseEmailBackend
from mailer.engine import send_all
from mailer.models import Message, MessageLog

from tests.benchmarks import handling
from tests.benchmarks.contenders import Drained
from tests.benchmarks.rows import settle_down


class Handing(BaseEmailBackend):
    def send_messages(self, messages: Sequence[EmailMessage]) -> int:
        for message in messages:
            handling.handle(int(message.subject))
        return len(messages)


def prepare(jobs: int) -> None:
    Message.objects.all().delete()
    MessageLog.objects.all().delete()
    mails = [
        EmailMessage(str(number), "Off you go.", "shop@example.com", ["anna@example.com"])
        for number in range(1, jobs + 1)
    ]
    get_connection().send_messages(mails)
    settle_down(Message._meta.db_table, MessageLog._meta.db_table)


def drain(workers: int) -> Drained:
    send_all()
    return Drained()


def left() -> int:
    return int(Message.objects.count())
