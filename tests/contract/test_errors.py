"""Exceptions of every kind, and what is kept of them."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import os
import signal
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
from django.db import connection

from dcl_processor import Report, Retry, batch_processor
from dcl_processor.exceptions import HandlerExited, InvalidOption, RowsFailed
from dcl_processor.report.log import logger
from tests.contract.support.parcels import in_batches, note, parcels, processor, sent, worked
from tests.contract.support.reports import assert_run
from tests.models import Errand, Parcel

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


def run(handle: Callable[[Parcel], Any]) -> Report:
    parcels(3)
    return processor(handle)()


class WithoutWordsError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class WithoutRepresentationError(WithoutWordsError):
    def __repr__(self) -> str:
        raise RuntimeError("no words either")


class WithoutEndError(Exception):
    def __str__(self) -> str:
        raise SystemExit("no words, and no run")


@dataclasses.dataclass(frozen=True)
class FrozenError(Exception):
    """What generated clients of web services raise: nothing can be set on it."""

    code: int


ANY = [
    FrozenError(404),
    WithoutEndError(),
    ExceptionGroup("frozen", [FrozenError(404)]),
    WithoutWordsError("x"),
    WithoutRepresentationError("x"),
    StopIteration(3),
    RecursionError(),
    MemoryError(),
    ExceptionGroup("several", [ValueError(1)]),
]


@pytest.mark.parametrize("error", ANY, ids=lambda error: type(error).__name__)
def test_any_exception_is_its_rows_failure_alone(error: Exception) -> None:
    def handle(row: Parcel) -> None:
        if row.priority == 1:
            raise error

    report = run(handle)
    assert_run(report, processed=2, failed=1)
    assert type(error).__name__ in json.dumps(report.as_dict())


class Timeout(BaseException):
    """As gevent has it: an error that handlers of errors are to leave alone."""


BASE = [asyncio.CancelledError(), GeneratorExit(), SystemExit(0), SystemExit("enough"), Timeout(3)]


@pytest.mark.parametrize("error", BASE, ids=lambda error: type(error).__name__)
def test_what_is_no_exception_is_its_rows_failure_alone(error: BaseException) -> None:
    def handle(row: Parcel) -> None:
        Parcel.objects.filter(pk=row.pk).update(note="half")
        if row.priority == 1:
            raise error

    report = run(handle)
    assert_run(report, processed=2, failed=1)
    [failure] = report.failures
    assert isinstance(failure.error, HandlerExited)
    assert failure.error.__cause__ is error
    assert repr(error) in str(failure.error)
    assert "in handle" in failure.traceback
    states = list(Parcel.objects.order_by("pk").values_list("sent", "note"))
    assert states == [(True, "half"), (False, ""), (True, "half")]


def exit_at_once(*_: Any) -> None:
    sys.exit(3)


def exit_and_trust_the_next_signal(signum: int, frame: FrameType | None) -> None:
    """As billiard, and with it Celery, does."""
    signal.signal(signum, signal.SIG_DFL)
    sys.exit(3)


@pytest.mark.parametrize("place", ["handler", "done", "claim"])
@pytest.mark.parametrize("stop", [exit_at_once, exit_and_trust_the_next_signal])
def test_an_exit_by_the_processs_own_signal_handler_ends_the_run(
    stop: Callable[..., Any], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the signal finds at work, it is the process that was to end, and no row failed."""

    def hit(where: str, row: Parcel) -> None:
        if where == place and row.priority == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0)  # where Python calls what handles it, at the latest

    def done(row: Parcel, _: Any) -> dict[str, Any]:
        hit("done", row)
        return {"sent": True}

    def from_db(cls: Any, *values: Any, **more: Any) -> Any:
        row = super(Parcel, cls).from_db(*values, **more)
        hit("claim", row)
        return row

    parcels(3)
    monkeypatch.setattr(Parcel, "from_db", classmethod(from_db))
    before = signal.signal(signal.SIGTERM, stop)
    try:
        with pytest.raises(SystemExit):
            processor(lambda row: hit("handler", row), done=done)()
    finally:
        signal.signal(signal.SIGTERM, before)
    monkeypatch.undo()
    assert [row.sent for row in Parcel.objects.order_by("pk")] == [True, False, False]


def lazily(row: Parcel) -> Iterator[int]:
    yield Parcel.objects.filter(pk=row.pk).update(note="worked")


async def asynchronously(row: Parcel) -> None: ...


@pytest.mark.parametrize("wrapped", [lazily, asynchronously])
def test_work_that_was_only_promised_is_not_done(wrapped: Callable[[Parcel], Any]) -> None:
    """A decorator hides what kind of function is behind it."""
    report = run(lambda row: wrapped(row))  # noqa: PLW0108  # that is the disguise
    assert_run(report, failed=3)
    assert "is never run" in str(report.failures[0].error)


class Large:
    """Something a handler has loaded."""


def test_a_failure_keeps_nothing_that_the_handler_had_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: list[weakref.ref[Large]] = []
    monkeypatch.setattr(logger, "disabled", True)  # pytest keeps every log record, errors and all

    def handle(row: Parcel) -> None:
        large = Large()
        kept.append(weakref.ref(large))
        try:
            raise ValueError("the first")  # noqa: TRY301  # there is nothing else to do it
        except ValueError as first:
            raise RuntimeError("the second") from first

    report = run(handle)
    gc.collect()
    assert_run(report, failed=3)
    assert "the first" in report.failures[0].traceback
    assert [reference() for reference in kept] == [None] * 3


# --- ``resource()``: opened once, kept, opened anew after a failure, and no row charged for it


class Service:
    """What a handler would send e-mails over; counts its connections, and "quit" ends one."""

    def __init__(self) -> None:
        self.connections = 0

    @contextmanager
    def connect(self) -> Iterator[Callable[[str], None]]:
        self.connections += 1
        said: list[str] = []

        def say(line: str) -> None:
            said.append(line)
            if "quit" in said:
                raise ConnectionError("the server has hung up")

        yield say


@pytest.fixture(params=[1, 5])
def batch_size(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def test_a_connection_that_was_lost_costs_one_row_and_is_opened_anew(batch_size: int) -> None:
    parcels(6)
    server = Service()

    def handle(row: Parcel, say: Callable[[str], None]) -> None:
        note(row)
        say("quit" if row.priority == 2 else "hello")

    run = in_batches(handle, resource=server.connect, batch_size=batch_size)
    report = run()
    assert_run(report, processed=5, failed=1)
    assert isinstance(report.failures[0].error, ConnectionError)
    assert sent() == worked() == [0, 1, 3, 4, 5]
    assert server.connections == 2


def test_a_server_that_is_down_charges_no_row(caplog: pytest.LogCaptureFixture) -> None:
    def refuse() -> Any:
        raise ConnectionRefusedError("no server")

    Errand.objects.create()
    calls: list[Any] = []
    run = batch_processor(
        pending=Errand.objects.filter(done=False),
        done={"done": True},
        resource=refuse,
        retry=Retry(max_attempts=1),
    )(lambda row, resource: calls.append(row))
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
