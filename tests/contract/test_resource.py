"""``resource()``: opened once, kept, opened anew after a failure, and no row charged for it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from socketserver import StreamRequestHandler, ThreadingTCPServer
from typing import Any

import pytest
from django.db import connection

from dcl_processor import Retry, batch_processor
from dcl_processor.exceptions import InvalidOption, RowsFailed
from tests.contract.support.batches import note, sent, worked
from tests.contract.support.parcels import in_batches, parcels
from tests.contract.support.reports import assert_run
from tests.models import Errand, Parcel

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


class Server(ThreadingTCPServer):
    """Answers each line with "ok", and counts who connects; a line "quit" ends a connection."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Talk)
        self.connections = 0
        self.open = 0

    def connect(self) -> Talker:
        return Talker(self.server_address)


class Talk(StreamRequestHandler):
    def handle(self) -> None:
        server: Any = self.server
        server.connections += 1
        for line in self.rfile:
            if line == b"quit\n":
                return
            self.wfile.write(b"ok\n")


class Talker:
    """A connection to the server: what a handler would send e-mails over."""

    def __init__(self, address: Any) -> None:
        self._socket = socket.create_connection(address, timeout=10)
        self._file = self._socket.makefile("rwb")

    def say(self, line: str) -> None:
        self._file.write(f"{line}\n".encode())
        self._file.flush()
        if self._file.readline() != b"ok\n":
            raise ConnectionError("the server has hung up")

    def close(self) -> None:
        self._file.close()
        self._socket.close()


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join(10)


@pytest.fixture(params=[1, 5])
def batch_size(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def test_many_rows_are_handled_over_one_connection(server: Server, batch_size: int) -> None:
    parcels(20)

    def handle(row: Parcel, talker: Talker) -> None:
        talker.say(f"row {row.priority}")

    run = in_batches(handle, resource=lambda: closing(server.connect()), batch_size=batch_size)
    assert_run(run(), processed=20)
    assert server.connections == 1


def test_a_connection_that_was_lost_costs_one_row_and_is_opened_anew(
    server: Server, batch_size: int
) -> None:
    parcels(6)

    def handle(row: Parcel, talker: Talker) -> None:
        note(row)
        talker.say("quit" if row.priority == 2 else "hello")

    run = in_batches(handle, resource=lambda: closing(server.connect()), batch_size=batch_size)
    report = run()
    assert_run(report, processed=5, failed=1)
    assert isinstance(report.failures[0].error, ConnectionError)
    assert sent() == worked() == [0, 1, 3, 4, 5]
    assert server.connections == 2


def test_a_server_that_is_down_charges_no_row(caplog: pytest.LogCaptureFixture) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as closed:
        address = closed.getsockname()
    Errand.objects.create()
    calls: list[Any] = []
    run = batch_processor(
        pending=Errand.objects.filter(done=False),
        done={"done": True},
        resource=lambda: closing(Talker(address)),
        retry=Retry(max_attempts=1),
    )(lambda row, talker: calls.append(row))
    report = run()
    assert_run(report, stopped="failures")
    assert not report.ok
    assert calls == []
    row = Errand.objects.get()
    assert (row.done, row.attempts, row.last_error) == (False, 0, "")
    assert "the resource could not be opened" in caplog.text
    assert isinstance(report.error, ConnectionRefusedError)
    assert report.as_dict()["error"] == repr(report.error)
    with pytest.raises(RowsFailed) as raised:
        report.raise_for_failures()
    assert raised.value.__cause__ is report.error


def test_a_second_thread_that_cannot_open_its_own_leaves_the_last_row_and_says_so() -> None:
    parcels(2)
    room, started, refused = [nullcontext()], threading.Event(), threading.Event()

    def resource() -> Any:
        try:
            return room.pop()  # in one step, whichever thread comes first
        except IndexError:
            assert started.wait(60)  # or the first row is left, too
            refused.set()
            raise OSError("one connection at a time") from None

    @batch_processor(
        pending=Parcel.objects.filter(sent=False), done={"sent": True}, resource=resource
    )
    def send(row: Parcel, _: object) -> None:
        started.set()
        assert refused.wait(60)

    report = send(concurrency=3)  # room for one more: the run waits for the last ones at its end
    assert_run(report, processed=1, stopped="failures")
    assert str(report.error) == "one connection at a time"
    assert not report.ok
    assert Parcel.objects.filter(sent=False).count() == 1


def test_it_is_closed_when_the_run_is_interrupted() -> None:
    parcels(2)
    lines: list[str] = []

    def handle(row: Parcel, lines: list[str]) -> None:
        raise KeyboardInterrupt

    run = in_batches(handle, resource=lambda: diary_to_the_end(lines))
    with pytest.raises(KeyboardInterrupt):
        run()
    assert lines == ["open", "close"]
    assert sent() == []


@contextmanager
def diary_to_the_end(lines: list[str]) -> Iterator[list[str]]:
    lines.append("open")
    try:
        yield lines
    finally:
        lines.append("close")


def test_one_that_cannot_be_closed_is_logged_and_the_rows_are_done(
    caplog: pytest.LogCaptureFixture,
) -> None:
    parcels(2)

    @contextmanager
    def sticky() -> Iterator[None]:
        yield
        raise OSError("sticky")

    report = in_batches(lambda row, resource: None, resource=sticky)()
    assert_run(report, processed=2)
    assert "the resource could not be closed" in caplog.text


def test_what_is_no_context_manager_is_refused_by_name() -> None:
    parcels(1)
    run = in_batches(lambda row, resource: None, resource=lambda: 7)
    with pytest.raises(InvalidOption, match=r"expected resource\(\) to return a context manager"):
        run()
    assert sent() == []
    assert not connection.in_atomic_block
