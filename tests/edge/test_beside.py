"""What a worker waits for beside its handlers: it is shown and warned of, and never ended."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
from django.db.models import QuerySet

from dcl_processor import BatchProcessor
from dcl_processor.candidates import scan
from dcl_processor.execution import calls
from dcl_processor.execution.calls import Call
from dcl_processor.processes.monitor import Monitor
from dcl_processor.processes.news import NOTICED_AFTER, AtWork, Beat, most_urgent
from dcl_processor.signals import row_finished
from tests.contract.support import errands as the
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True)


class Nosy(BatchProcessor[Errand]):
    """Notes in each of its hooks what is known to be under way."""

    name = "shop.nosy"

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, list[str]] = {}

    def look(self, hook: str) -> None:
        self.seen.setdefault(hook, [AtWork.of(call).named for call in calls.under_way()])

    def pending(self) -> QuerySet[Errand]:
        self.look("pending")
        return the.PENDING

    def throttle(self) -> None:
        self.look("throttle")

    @contextmanager
    def resource(self) -> Iterator[None]:
        self.look("resource")
        yield
        self.look("end of resource")

    def process(self, row: Errand, _: None) -> None:
        self.look("process")
        if row.place == 1:
            raise OSError

    def get_done(self, row: Errand, result: Any) -> Mapping[str, Any]:
        self.look("get_done")
        return {"done": True}

    def get_failed(self, row: Errand, error: Exception) -> Mapping[str, Any]:
        self.look("get_failed")
        return {"dead": True}


@pytest.fixture
def nosy() -> Iterator[Nosy]:
    made = Nosy()

    def finished(**_: Any) -> None:
        made.look("row_finished")

    row_finished.connect(finished)
    yield made
    row_finished.disconnect(finished)


def test_each_hook_is_known_while_it_is_called(nosy: Nosy, monkeypatch: pytest.MonkeyPatch) -> None:
    done, failed = the.errands(2)
    read = scan._read

    def look(*arguments: Any) -> Any:
        nosy.look("read")
        return read(*arguments)

    monkeypatch.setattr(scan, "_read", look)
    with Monitor(lambda _: None):
        nosy()
    assert nosy.seen.pop("pending")[-1:] == ["pending()"]
    assert nosy.seen == {
        "read": ["the read of pending"],
        "throttle": ["throttle()"],
        "resource": ["resource()"],
        "process": [f"row {done.pk}"],
        "get_done": [f"get_done() for row {done.pk}"],
        "row_finished": [f"receivers of row_finished for row {done.pk}"],
        "get_failed": [f"get_failed() for row {failed.pk}"],
        "end of resource": ["the end of resource()"],
    }
    assert calls.under_way() == []


@pytest.fixture
def hung() -> Iterator[Call]:
    call = Call("shop.send", (17,), None, what="get_done()")
    calls.begin(call)
    yield call
    calls.end(call)


def test_a_hook_that_hangs_is_warned_of_and_never_late(
    hung: Call, caplog: pytest.LogCaptureFixture
) -> None:
    beats: list[Beat] = []
    Monitor(beats.append).look(hung.since + 301)
    (line,) = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert line.startswith(
        f"shop.send: process {os.getpid()}: get_done() for row 17 has not returned after 5 min "
    )
    (beat,) = beats
    assert beat.call == AtWork.of(hung)
    assert not beat.call.is_late(beat.at)


def test_a_hook_that_ends_soon_makes_no_idle_worker_a_busy_one(hung: Call) -> None:
    assert most_urgent(hung.since + NOTICED_AFTER / 2) is None
    assert most_urgent(hung.since + NOTICED_AFTER) is not None
