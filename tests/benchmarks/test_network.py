"""The proxy of the benchmark: what it delays and counts."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

import psycopg
import pytest
from django.db import connection

from tests.benchmarks.contenders import raw
from tests.benchmarks.network import Proxy, proxy
from tests.benchmarks.protocol import Conversation, Counts, EncryptedError

pytestmark = pytest.mark.skipif(
    connection.vendor != "postgresql", reason="it knows PostgreSQL's protocol"
)


@pytest.fixture(scope="module")
def through() -> Iterator[Proxy]:
    with proxy(0.0) as running:
        yield running


@pytest.mark.django_db
def test_each_round_trip_takes_at_least_the_delay() -> None:
    with proxy(0.005) as delayed, raw.connect(prepared=False, host=delayed.host) as driver:
        for _ in range(20):
            began = time.perf_counter()
            driver.execute("SELECT 1")
            assert time.perf_counter() - began >= 0.005


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("statements", "messages", "commits"),
    [
        (["SELECT 1; SELECT 2"], 1, 1),
        (["BEGIN; SELECT 1", "COMMIT; BEGIN; SELECT 2", "COMMIT"], 3, 2),
        (["SELECT 1; BEGIN; SELECT 2", "COMMIT"], 2, 1),
        (["BEGIN", "SELECT 1", "ROLLBACK", "SELECT 2"], 4, 1),
        (["BEGIN", "SELECT 1 / 0", "COMMIT"], 3, 0),
        (["SELECT 1; SELECT 1 / 0"], 1, 0),
    ],
)
def test_messages_and_commits_are_counted_exactly(
    through: Proxy, statements: Sequence[str], messages: int, commits: int
) -> None:
    with raw.connect(prepared=False, host=through.host) as driver:
        through.take_counts()
        for statement in statements:
            with suppress(psycopg.errors.DivisionByZero):
                driver.execute(statement.encode())
        assert through.take_counts() == Counts(messages, commits)


def message(kind: bytes, content: bytes = b"") -> bytes:
    return kind + struct.pack("!i", len(content) + 4) + content


SENT = b"".join(
    [
        message(b"", struct.pack("!i", 196608) + b"user\0postgres\0\0"),
        message(b"Q", b"SELECT 'SQHF'\0"),
        *(message(kind, b"QSFH" * 9) for kind in (b"P", b"B", b"E")),
        message(b"S"),
    ]
)
ANSWERED = b"".join(
    [
        *(message(b"D", b"C\0\0\0\x0bCOMMIT\0" * 3), message(b"C", b"SELECT 1\0")),
        *(message(b"Z", b"I"), message(b"C", b"BEGIN\0"), message(b"Z", b"T")),
        *(message(b"C", b"UPDATE 1\0"), message(b"Z", b"T")),
        *(message(b"C", b"COMMIT\0"), message(b"Z", b"I")),
    ]
)


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_the_counts_do_not_depend_on_where_the_chunks_end(size: int) -> None:
    counts = Counts()
    conversation = Conversation(counts)
    for stream, count in ((SENT, conversation.request), (ANSWERED, conversation.answer)):
        for start in range(0, len(stream), size):
            count(stream[start : start + size])
    assert counts == Counts(messages=2, commits=2)


def test_encryption_is_an_error() -> None:
    conversation = Conversation(Counts())
    conversation.request(message(b"", struct.pack("!i", 80877103)))
    with pytest.raises(EncryptedError, match="without encryption"):
        conversation.answer(b"S")
