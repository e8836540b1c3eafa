"""The proxy of the benchmark: what it delays, counts and forwards, and when it ends."""

from __future__ import annotations

import os
import secrets
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
from django.db import connection
from psycopg.errors import AdminShutdown, QueryCanceled
from psycopg.pq import DiagnosticField, ExecStatus
from psycopg.pq.abc import PGresult

from tests.benchmarks import handling, page
from tests.benchmarks.contenders import raw, raw_one_message
from tests.benchmarks.measuring import COMMITS, DELAY, MESSAGES, Measurement
from tests.benchmarks.network import CHECKOUT, Proxy, ProxyFailedError, measured_delay, proxy
from tests.benchmarks.network_table import headings, lines
from tests.benchmarks.protocol import Conversation, Counts, EncryptedError
from tests.models import Errand
from tests.waiting import PATIENCE, until

pytestmark = pytest.mark.skipif(
    connection.vendor != "postgresql", reason="it knows PostgreSQL's protocol"
)

TRIES = 50


@pytest.fixture(scope="module")
def through() -> Iterator[Proxy]:
    with proxy(0.0) as running:
        yield running


@pytest.mark.django_db
def test_each_round_trip_takes_at_least_the_delay() -> None:
    with proxy(0.005) as delayed, raw.connect(prepared=False, host=delayed.host) as driver:
        times = [seconds(lambda: driver.execute("SELECT 1")) for _ in range(20)]
    assert min(times) >= 0.005


@pytest.mark.django_db
def test_without_a_delay_a_round_trip_can_be_shorter(through: Proxy) -> None:
    with raw.connect(prepared=False, host=through.host) as driver:
        assert any(seconds(lambda: driver.execute("SELECT 1")) < 0.005 for _ in range(500))


@pytest.mark.django_db
def test_two_messages_sent_together_take_one_delay() -> None:
    delay = 0.05
    with proxy(delay) as delayed, raw.connect(prepared=True, host=delayed.host) as driver:
        driver.pgconn.enter_pipeline_mode()
        for _ in range(TRIES):
            taken = seconds(lambda: send_together(driver, 2))
            assert taken >= delay
            if taken < 2 * delay:
                return
    pytest.fail(f"expected two messages in less than {2 * delay} s, got {taken} s at the last")


def send_together(driver: psycopg.Connection[Any], number: int) -> None:
    for _ in range(number):
        driver.pgconn.send_query_params(b"SELECT 1", None)
        driver.pgconn.pipeline_sync()
    while number:
        result = driver.pgconn.get_result()
        number -= result is not None and result.status == ExecStatus.PIPELINE_SYNC


@pytest.mark.django_db
def test_the_measured_delay_is_that_of_the_proxy() -> None:
    delay = 0.1
    with proxy(delay) as delayed:
        assert any(delay / 2 < measured_delay(delayed, 9) < 2 * delay for _ in range(5))


@pytest.mark.django_db
def test_large_messages_arrive_whole_and_cost_one_delay() -> None:
    delay, text = 1.0, secrets.token_hex(2_500_000)
    with proxy(delay) as delayed, raw.connect(prepared=True, host=delayed.host) as driver:
        began = time.monotonic()
        echo = driver.execute("SELECT %s::text, i FROM generate_series(1, 3) i", [text]).fetchall()
        taken = time.monotonic() - began
    assert echo == [(text, number) for number in (1, 2, 3)]
    # A delay for each chunk, of what fits into a socket's buffer, would be most of a minute.
    assert delay <= taken < 25


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("statements", "messages", "commits"),
    [
        (["SELECT 1"], 1, 1),
        (["SELECT 1; SELECT 2"], 1, 1),
        (["BEGIN", "SELECT 1", "SELECT 2", "COMMIT"], 4, 1),
        (["BEGIN; SELECT 1; COMMIT"], 1, 1),
        (["BEGIN; SELECT 1; COMMIT; BEGIN; SELECT 2; COMMIT"], 1, 2),
        (["BEGIN; SELECT 1", "COMMIT; BEGIN; SELECT 2", "COMMIT"], 3, 2),
        (["SELECT 1; BEGIN; SELECT 2", "COMMIT"], 2, 1),
        (["BEGIN", "SELECT 1", "ROLLBACK", "SELECT 2"], 4, 1),
        (["BEGIN", "SAVEPOINT s", "SELECT 1", "ROLLBACK TO s", "SELECT 2", "COMMIT"], 6, 1),
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


@pytest.mark.django_db
def test_the_extended_protocol_is_one_message_for_each_sync(through: Proxy) -> None:
    with raw.connect(prepared=True, host=through.host) as driver:
        through.take_counts()
        driver.execute("SELECT %s", [1])
        driver.pgconn.enter_pipeline_mode()
        send_together(driver, 3)
        assert through.take_counts() == Counts(messages=4, commits=4)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("drain", "messages"),
    [
        # Two reads of keys, the last of which finds none.
        (lambda: raw.drain(1, batch_size=1), 2 + 4 * 6),
        (lambda: raw_one_message.drain(1), 2 + 6 + 1),
    ],
)
def test_what_the_bare_driver_sends(
    drain: Callable[[], Any],
    messages: int,
    through: Proxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Errand.objects.bulk_create([Errand() for _ in range(6)])
    monkeypatch.setitem(connection.settings_dict, "HOST", through.host)
    close = handling.open_log(tmp_path / "log", 0, 0)
    through.take_counts()
    assert drain().handled == 6
    counts = through.take_counts()
    close()
    assert counts == Counts(messages, commits=2 + 6)
    assert not Errand.objects.filter(done=False).exists()
    assert [call.pk for call in handling.read_log(tmp_path / "log")] == sorted(
        Errand.objects.values_list("pk", flat=True)
    )


@pytest.mark.django_db(transaction=True)
def test_one_message_per_row_leaves_a_locked_row_alone(tmp_path: Path) -> None:
    Errand.objects.bulk_create([Errand() for _ in range(5)])
    pks = sorted(Errand.objects.values_list("pk", flat=True))
    close = handling.open_log(tmp_path / "log", 0, 0)
    with raw.connect(prepared=False) as other, other.transaction():
        for pk in (pks[0], pks[2], pks[4]):
            other.execute(raw.with_keys(raw.LOCK, [pk]), [pk])
        assert raw_one_message.drain(1).handled == 2
    close()
    assert [call.pk for call in handling.read_log(tmp_path / "log")] == [pks[1], pks[3]]
    left = Errand.objects.filter(done=False).values_list("pk", flat=True)
    assert sorted(left) == [pks[0], pks[2], pks[4]]


def message(kind: bytes, content: bytes = b"") -> bytes:
    return kind + struct.pack("!i", len(content) + 4) + content


ASK_FOR_TLS, ASK_FOR_GSSAPI = (message(b"", struct.pack("!i", n)) for n in (80877103, 80877104))
STARTUP = message(b"", struct.pack("!i", 196608) + b"user\0postgres\0\0")
SENT = b"".join(
    [
        STARTUP,
        message(b"Q", b"SELECT 'SQHF'\0"),
        *(message(kind, b"QSFH" * 9) for kind in (b"P", b"B", b"E")),
        message(b"S"),
        message(b"H"),
        message(b"X"),
    ]
)
ANSWERED = b"".join(
    [
        message(b"Z", b"I"),
        *(message(b"D", b"C\0\0\0\x0bCOMMIT\0" * 3), message(b"C", b"SELECT 1\0")),
        message(b"Z", b"I"),
        *(message(b"C", b"BEGIN\0"), message(b"Z", b"T"), message(b"C", b"UPDATE 1\0")),
        *(message(b"Z", b"T"), message(b"C", b"COMMIT\0"), message(b"Z", b"I")),
    ]
)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 64, 10_000])
def test_the_counts_do_not_depend_on_where_the_chunks_end(size: int) -> None:
    counts = Counts()
    conversation = Conversation(counts)
    for stream, count in ((SENT, conversation.request), (ANSWERED, conversation.answer)):
        for start in range(0, len(stream), size):
            count(stream[start : start + size])
    assert counts == Counts(messages=3, commits=2)


def test_a_refusal_of_encryption_is_no_message() -> None:
    counts = Counts()
    conversation = Conversation(counts)
    for ask in (ASK_FOR_TLS, ASK_FOR_GSSAPI):
        conversation.request(ask)
        conversation.answer(b"N")
    conversation.request(SENT)
    conversation.answer(ANSWERED)
    assert counts == Counts(messages=3, commits=2)


def test_encryption_is_an_error() -> None:
    conversation = Conversation(Counts())
    conversation.request(ASK_FOR_TLS)
    with pytest.raises(EncryptedError, match="without encryption"):
        conversation.answer(b"S")


def test_it_ends_with_the_process_that_started_it() -> None:
    code = (
        "import django, time; django.setup()\n"
        "from tests.benchmarks.network import proxy\n"
        "with proxy(0.0) as running:\n"
        "    print(running.process.pid, running.host, flush=True)\n"
        "    time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=CHECKOUT, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid, host = parent.stdout.readline().split()
        running = psutil.Process(int(pid))
        assert Path(host).exists()
        os.kill(parent.pid, signal.SIGKILL)
    with suppress(psutil.NoSuchProcess):
        until(lambda: running.status() == psutil.STATUS_ZOMBIE, "the end of the proxy")
    assert not Path(host).exists()


def test_it_ends_after_its_lifetime(capfd: pytest.CaptureFixture[str]) -> None:
    with proxy(0.0, lifetime=0.2) as running:
        assert running.process.wait(PATIENCE) == 1
    assert not Path(running.host).exists()
    expected = "The delay proxy: expected the end of its input within 0.2 s, got none.\n"
    assert capfd.readouterr().err == expected


def test_a_proxy_that_was_killed_is_named_and_leaves_nothing() -> None:
    with proxy(0.0) as running:
        running.process.kill()
        running.process.wait(PATIENCE)
        with pytest.raises(ProxyFailedError, match="expected a line from the delay proxy"):
            running.take_counts()
    assert not Path(running.host).exists()


@pytest.mark.django_db
def test_it_outlives_clients_that_hang_up(through: Proxy) -> None:
    for _ in range(3):
        driver = raw.connect(prepared=False, host=through.host)
        driver.pgconn.send_query(b"SELECT repeat('x', 1000000)")
        driver.close()
    with raw.connect(prepared=False, host=through.host) as driver:
        assert driver.execute("SELECT 1").fetchone() == (1,)


@pytest.mark.django_db
def test_each_of_many_connections_gets_its_own_answers(through: Proxy) -> None:
    with ExitStack() as stack:
        drivers = [
            stack.enter_context(raw.connect(prepared=False, host=through.host)) for _ in range(10)
        ]
        for number, driver in enumerate(drivers):
            driver.pgconn.send_query(b"SELECT %d" % number)
        answers = [answer_to(driver).get_value(0, 0) for driver in reversed(drivers)]
    assert answers == [b"%d" % number for number in reversed(range(10))]


@pytest.mark.django_db
def test_a_query_can_be_cancelled(through: Proxy) -> None:
    with (
        raw.connect(prepared=False) as other,
        raw.connect(prepared=False, host=through.host) as driver,
    ):
        driver.pgconn.send_query(b"SELECT pg_sleep(100)")
        # A cancel that overtakes the query does nothing.
        until(lambda: is_active(other, driver.info.backend_pid), "the query")
        driver.pgconn.get_cancel().cancel()
        assert sqlstate_of(answer_to(driver)) == QueryCanceled.sqlstate


@pytest.mark.django_db
def test_the_servers_reason_for_closing_arrives() -> None:
    """Also if a message that the server does not read any more is under way to it."""
    with (
        proxy(2.0) as delayed,
        raw.connect(prepared=False) as other,
        raw.connect(prepared=False, host=delayed.host) as driver,
    ):
        driver.pgconn.send_query(b"SELECT pg_sleep(100)")
        other.execute("SELECT pg_terminate_backend(%s)", [driver.info.backend_pid])
        assert sqlstate_of(answer_to(driver)) == AdminShutdown.sqlstate


def is_active(other: psycopg.Connection[Any], pid: int) -> bool:
    [[state]] = other.execute("SELECT state FROM pg_stat_activity WHERE pid = %s", [pid])
    return bool(state == "active")


def answer_to(driver: psycopg.Connection[Any]) -> PGresult:
    """Return the first result of what was sent, after the last one."""
    answer, *_ = iter(driver.pgconn.get_result, None)
    return answer


def sqlstate_of(answer: PGresult) -> str:
    return (answer.error_field(DiagnosticField.SQLSTATE) or b"").decode()


COUNTS = {MESSAGES: 4.0, COMMITS: 1.0}
RESULTS = [
    *(Measurement("network", "loop", 1, 1, 10, {"rate": rate}) for rate in (1000.0, 1200.0)),
    *(
        Measurement("network", "loop", 1, 1, 10, {"rate": 99.6, DELAY: delay, **COUNTS}, "2 ms")
        for delay in (2.0, 2.04, 2.3)
    ),
]


def test_a_table_has_a_line_for_each_contender_and_three_for_the_delay() -> None:
    assert headings(RESULTS)[-2:] == ["rows/s, socket", "rows/s, 2 ms"]
    loop, *delays = lines(RESULTS)
    assert loop == ("loop", "10", "4.000", "1.000", "1,100", "100")
    assert [line[-2:] for line in delays] == [("–", "2.04"), ("–", "2.00"), ("–", "2.30")]


def test_a_run_of_networks_alone_keeps_the_other_tables(tmp_path: Path) -> None:
    page.write(RESULTS, {"fsync": "on"}, tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {f"benchmark-network{name}.inc" for name in ("", "-rates", "-server")}
    rates = (tmp_path / "benchmark-network-rates.inc").read_text().splitlines()
    assert rates[2:] == [
        "| network, socket | loop | 1 | 10 | 1,100 | 1,000 | 1,200 | – |",
        "| network, 2 ms | loop | 1 | 10 | 100 | 100 | 100 | – |",
    ]


def seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
