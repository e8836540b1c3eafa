"""Tables of other packages, each drained by a processor as it is, retry columns included.

A mail that is deferred has failed in this run: the report says so, and the table says when it is
tried again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from aiosmtpd.smtp import SMTP, Envelope, Session
from django.core.mail import EmailMessage
from django.db.models import F, Q
from django.db.models.functions import Now
from django.test import override_settings
from email_relay.email import RelayEmailData
from email_relay.models import Message as RelayMessage
from email_relay.models import Status
from mailer.models import PRIORITY_DEFERRED, PRIORITY_MEDIUM, RESULT_SUCCESS, MessageLog
from mailer.models import Message as MailerMessage
from post_office.models import STATUS, Email

from dcl_processor import BatchProcessor, Retry, batch_processor
from dcl_processor.clock import DatabaseNow
from sample_app.mail_settings import smtp_settings
from sample_app.shop.demo.mailbox import HOST, Mailbox
from tests.contract.support.reports import assert_run
from tests.models import QueuedTask

pytestmark = pytest.mark.django_db(transaction=True)

ATTEMPTS = 3
TO = ("one@example.com", "full@example.com", "two@example.com")
FULL = TO[1]


class StrictMailbox(Mailbox):
    """A mail server that has no room for the mail to some addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.full = {FULL}

    async def handle_RCPT(  # noqa: N802  # the name is aiosmtpd's
        self, server: SMTP, session: Session, envelope: Envelope, address: str, options: list[str]
    ) -> str:
        if address in self.full:
            return "452 mailbox is full"
        envelope.rcpt_tos.append(address)
        return "250 OK"

    @property
    def recipients(self) -> list[str]:
        return sorted(mail.recipient for mail in self.mails)


@pytest.fixture
def server() -> Iterator[StrictMailbox]:
    with StrictMailbox() as server, override_settings(**smtp_settings(HOST, server.port)):
        yield server


def mail_to(address: str) -> EmailMessage:
    return EmailMessage("Your order", "is on its way", "shop@example.com", [address])


def assert_deferred_and_given_up(
    run: BatchProcessor[Any], server: StrictMailbox, defers: Callable[[int], None]
) -> None:
    """Run until the mail to the full mailbox is given up; ``defers``: checks the table."""
    sent = 2
    for attempt in range(1, ATTEMPTS):
        report = run()
        assert_run(report, processed=sent, failed=1, retried=1)
        assert "mailbox is full" in str(report.failures[0].error)
        sent = 0
        assert server.recipients == ["one@example.com", "two@example.com"]
        defers(attempt)
    assert_run(run(), failed=1)
    assert_run(run())


def queue_in_relay(address: str) -> RelayMessage:
    data = RelayEmailData.from_email_message(mail_to(address)).to_dict()
    return RelayMessage.objects.create(data=data)


def relay_processor() -> BatchProcessor[RelayMessage]:
    @batch_processor(
        pending=lambda: RelayMessage.objects.filter(
            status__in=[Status.QUEUED, Status.DEFERRED]
        ).order_by("-priority", "created_at"),
        done={"status": Status.SENT, "sent_at": DatabaseNow()},
        failed={"status": Status.FAILED},
        retry=Retry(
            ATTEMPTS,
            attempts="retry_count",
            next_attempt_at=None,
            last_error="log",
            on_failure={"status": Status.DEFERRED, "updated_at": DatabaseNow()},
        ),
    )
    def relay(message: RelayMessage) -> None:
        email = message.email
        assert email is not None
        email.send()

    return relay


def test_django_email_relay(server: StrictMailbox) -> None:
    for address in TO:
        queue_in_relay(address)
    run = relay_processor()

    def defers(attempt: int) -> None:
        [message] = RelayMessage.objects.exclude(status=Status.SENT)
        assert (message.status, message.retry_count) == (Status.DEFERRED, attempt)
        assert "mailbox is full" in message.log

    assert_deferred_and_given_up(run, server, defers)
    [message] = RelayMessage.objects.exclude(status=Status.SENT)
    assert (message.status, message.retry_count) == (Status.FAILED, ATTEMPTS)
    sent = RelayMessage.objects.filter(status=Status.SENT)
    assert {(each.retry_count, each.log, each.sent_at is None) for each in sent} == {(0, "", False)}


def test_django_email_relay_after_the_mailbox_has_room(server: StrictMailbox) -> None:
    message = queue_in_relay(FULL)
    run = relay_processor()
    assert_run(run(), failed=1, retried=1)
    server.full.clear()
    assert_run(run(), processed=1)
    message.refresh_from_db()
    assert (message.status, message.retry_count, message.log) == (Status.SENT, 0, "")


def mailer_processor() -> BatchProcessor[MailerMessage]:
    @batch_processor(
        pending=lambda: MailerMessage.objects.order_by("priority", "when_added"),
        retry=Retry(
            ATTEMPTS,
            attempts="retry_count",
            next_attempt_at=None,
            last_error=None,
            on_failure={"priority": PRIORITY_DEFERRED},
        ),
    )
    def send(message: MailerMessage) -> None:
        message.email.send()
        MessageLog.objects.log(message, RESULT_SUCCESS)
        message.delete()

    return send


def test_django_mailer(server: StrictMailbox) -> None:
    for address in TO:
        message = MailerMessage(priority=PRIORITY_MEDIUM)
        message.email = mail_to(address)
        message.save()

    def defers(attempt: int) -> None:
        [message] = MailerMessage.objects.all()
        assert (message.priority, message.retry_count) == (PRIORITY_DEFERRED, attempt)
        assert message.to_addresses == [FULL]

    assert_deferred_and_given_up(mailer_processor(), server, defers)
    # django-mailer has no state for it: the message stays, without attempts left.
    [message] = MailerMessage.objects.all()
    assert (message.priority, message.retry_count) == (PRIORITY_DEFERRED, ATTEMPTS)
    assert MessageLog.objects.filter(result=RESULT_SUCCESS).count() == 2
    # What its own command does: one more attempt, if the limit is raised.
    MailerMessage.objects.update(retry_count=ATTEMPTS - 1)
    server.full.clear()
    assert_run(mailer_processor()(), processed=1)
    assert not MailerMessage.objects.exists()
    assert FULL in server.recipients


def post_office_processor() -> BatchProcessor[Email]:
    @batch_processor(
        pending=lambda: (
            Email.objects.filter(
                Q(expires_at=None) | Q(expires_at__gt=Now()),
                status__in=[STATUS.queued, STATUS.requeued],
            )
            .order_by("-priority", "created")
            .prefetch_related("attachments")
        ),
        # A success clears the columns of the retry, unless done names them.
        done={
            "status": STATUS.sent,
            "number_of_retries": F("number_of_retries"),
            "scheduled_time": F("scheduled_time"),
            "last_updated": DatabaseNow(),
        },
        failed={"status": STATUS.failed},
        retry=Retry(
            ATTEMPTS,
            backoff=900,
            jitter=0,
            attempts="number_of_retries",
            next_attempt_at="scheduled_time",
            last_error=None,
            on_failure={"status": STATUS.requeued, "last_updated": DatabaseNow()},
        ),
    )
    def send(email: Email) -> None:
        email.dispatch(commit=False)

    return send


def test_django_post_office(server: StrictMailbox) -> None:
    later, gone = (datetime.now(UTC) + timedelta(days=days) for days in (1, -1))
    queued: dict[str, Any] = {"from_email": "shop@example.com", "status": STATUS.queued}
    for address in TO:
        Email.objects.create(to=address, **queued)
    Email.objects.create(to="later@example.com", scheduled_time=later, **queued)
    Email.objects.create(to="gone@example.com", expires_at=gone, **queued)
    run = post_office_processor()
    [full] = Email.objects.filter(to=FULL, number_of_retries=None)

    def defers(attempt: int) -> None:
        full.refresh_from_db()
        assert (full.status, full.number_of_retries) == (STATUS.requeued, attempt)
        row = Email.objects.annotate(now=DatabaseNow()).get(pk=full.pk)
        waits = (row.scheduled_time - row.now).total_seconds()
        assert 900 * 2 ** (attempt - 1) - 60 < waits <= 900 * 2 ** (attempt - 1)
        assert_run(run())  # not before
        Email.objects.filter(pk=full.pk).update(scheduled_time=None)

    assert_deferred_and_given_up(run, server, defers)
    full.refresh_from_db()
    assert (full.status, full.number_of_retries) == (STATUS.failed, ATTEMPTS)
    sent = Email.objects.filter(status=STATUS.sent)
    assert all(each.number_of_retries is None for each in sent)
    assert Email.objects.filter(status=STATUS.queued).count() == 2


# ModelQueue has no table: its field is a BigIntegerField, which a project puts into a model of its
# own, as QueuedTask does. The package itself is not installed, because it needs pytz; its release
# 2.2.1 works with Django 5.2, and wrote such numbers there. The number of a row is, in decimal,
# one digit for the state, seventeen for the time from which it may run, and one for its attempts.
WAITING, FINISHED, CANCELED = (state * 10**18 for state in (2, 4, 5))


def at(seconds: float) -> int:
    """Return the digits of the time so many seconds from now, with room for the attempts."""
    moment = datetime.now(UTC) + timedelta(seconds=seconds)
    return int(f"{moment:%Y%m%d%H%M%S}{moment.microsecond // 1000:03}") * 10


def attempts(task: QueuedTask) -> int:
    return task.status % 10


def queue_processor(handler: Callable[[QueuedTask], None]) -> BatchProcessor[QueuedTask]:
    # The time is no part of pending: after a failure the row is still pending, and due later.
    return batch_processor(
        pending=lambda: QueuedTask.objects.filter(
            status__gte=WAITING, status__lt=WAITING + 10**18
        ).order_by("status"),
        done={"status": F("status") + (FINISHED - WAITING)},
        failed={"status": F("status") + (CANCELED - WAITING) + 1},
        retry=Retry(
            lambda task: ATTEMPTS - attempts(task),
            attempts=None,
            next_attempt_at=None,
            last_error=None,
            on_failure={"status": lambda: F("status") % 10 + (WAITING + at(60) + 1)},
        ),
    )(handler)


def due() -> Q:
    return Q(status__lte=WAITING + at(0) + 9)


def test_a_queue_whose_state_time_and_attempts_are_one_number() -> None:
    """The table is made by hand, as with ModelQueue's own field; see above."""
    tasks = [QueuedTask.objects.create(status=WAITING + at(-1)) for _ in range(3)]
    waits = QueuedTask.objects.create(status=WAITING + at(3600))
    bad = tasks[1].pk

    def handle(task: QueuedTask) -> None:
        if task.pk == bad:
            raise OSError("no answer")

    run, processed = queue_processor(handle), 2
    for attempt in range(1, ATTEMPTS):
        assert_run(run(filter=due()), processed=processed, failed=1, retried=1)
        processed = 0
        task = QueuedTask.objects.get(pk=bad)
        assert WAITING + at(0) < task.status <= WAITING + at(60) + 9
        assert attempts(task) == attempt
        assert_run(run(filter=due()))  # not before
        QueuedTask.objects.filter(pk=bad).update(status=WAITING + at(-1) + attempt)
    assert_run(run(filter=due()), failed=1)
    assert_run(run(filter=due()))
    task = QueuedTask.objects.get(pk=bad)
    assert (task.status // 10**18, attempts(task)) == (5, ATTEMPTS)
    waits.refresh_from_db()
    assert (waits.status // 10**18, attempts(waits)) == (2, 0)
    finished = QueuedTask.objects.filter(status__gte=FINISHED, status__lt=CANCELED)
    assert {each.pk for each in finished} == {tasks[0].pk, tasks[2].pk}
