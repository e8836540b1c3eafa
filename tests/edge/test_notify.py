"""wake(): one NOTIFY for a transaction, after its commit, and never one for each row."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psycopg
import pytest
from django.db import connection, transaction

from dcl_processor import BatchProcessor, batch_processor
from dcl_processor.workers import notify
from tests.contract.support.sessions import end_session
from tests.models import Parcel

pytestmark = pytest.mark.django_db(transaction=True)

Heard = Callable[[], list[str]]


class Error(Exception):
    """Rolls a block back."""


@contextmanager
def rolled_back() -> Iterator[None]:
    with suppress(Error), transaction.atomic():
        yield
        raise Error


def processor(name: str) -> BatchProcessor[Parcel]:
    @batch_processor(
        pending=lambda: Parcel.objects.filter(sent=False), done={"sent": True}, name=name
    )
    def send(parcel: Parcel) -> None:
        """Pretend."""

    return send


send = processor("depot.send")
weigh = processor("depot.weigh")


@pytest.fixture
def heard() -> Iterator[Heard]:
    """Listen; return what takes the channels of the notifications that have come in since."""
    listener = connection.copy()
    with listener.cursor() as cursor:
        for each in (send, weigh):
            cursor.execute(f'LISTEN "{notify.channel(each.name)}"')

    def heard() -> list[str]:
        # The answer to a statement is preceded by whatever was notified before it.
        with listener.cursor() as cursor:
            cursor.execute("SELECT 1")
        assert isinstance(listener.connection, psycopg.Connection)
        return [each.channel for each in listener.connection.notifies(timeout=0)]

    yield heard
    listener.close()


def test_inside_a_transaction_it_notifies_once_after_the_commit(heard: Heard) -> None:
    with transaction.atomic():
        for _ in range(100):
            send.wake()
            weigh.wake()
        with transaction.atomic():
            send.wake()
        assert heard() == []
    assert heard() == ["dcl_processor.depot.send", "dcl_processor.depot.weigh"]


def test_what_is_rolled_back_wakes_nobody(heard: Heard) -> None:
    with rolled_back():
        send.wake()
    assert heard() == []
    # Nor does it keep a later one from it, or go out with it.
    with transaction.atomic():
        weigh.wake()
    assert heard() == ["dcl_processor.depot.weigh"]
    with transaction.atomic():
        send.wake()
    assert heard() == ["dcl_processor.depot.send"]


def test_a_savepoint_that_is_rolled_back_takes_back_only_its_own(heard: Heard) -> None:
    with transaction.atomic():
        with rolled_back():
            send.wake()
        weigh.wake()
    assert heard() == ["dcl_processor.depot.weigh"]
    with transaction.atomic():
        send.wake()
        with rolled_back():
            send.wake()
    assert heard() == ["dcl_processor.depot.send"]


def test_a_notify_that_fails_is_logged_and_fails_nobody(
    heard: Heard, caplog: pytest.LogCaptureFixture
) -> None:
    end_session()
    with caplog.at_level(logging.WARNING, "dcl_processor"):
        send.wake()
    assert "the watchers on 'dcl_processor.depot.send' were not notified: " in caplog.text
    assert heard() == []
    connection.close()
    send.wake()
    assert heard() == ["dcl_processor.depot.send"]


def test_a_channel_fits_postgresql_and_stays_that_processors_own() -> None:
    assert notify.channel("shop.send") == "dcl_processor.shop.send"
    names = ["x" * 49, "x" * 50, "x" * 51, "ü" * 50, "ü" * 50 + "x"]
    channels = {notify.channel(name) for name in names}
    assert len(channels) == len(names)
    assert all(len(each.encode()) <= 63 for each in channels)
    with connection.cursor() as cursor:
        for each in channels:
            cursor.execute("SELECT pg_notify(%s, '')", [each])
