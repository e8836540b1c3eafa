"""What a watcher costs while nothing is pending."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import close_old_connections, connection

from dcl_processor.signals import run_finished
from dcl_processor.workers import watch as watch_module
from dcl_processor.workers.stopping import Stop
from dcl_processor.workers.watch import POLL_IDLE, Plan, Watch
from tests.waiting import PATIENCE
from tests.warehouse.processors import deliver, weigh

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(params=[0, 60])
def max_age(request: pytest.FixtureRequest) -> Iterator[int]:
    """Set CONN_MAX_AGE."""
    before = connection.settings_dict["CONN_MAX_AGE"]
    connection.close()
    connection.settings_dict["CONN_MAX_AGE"] = request.param
    yield request.param
    connection.close()
    connection.settings_dict["CONN_MAX_AGE"] = before


@contextmanager
def runs() -> Iterator[list[str]]:
    """Note each run that ends."""
    made: list[str] = []

    def note(processor: Any, **_: object) -> None:
        made.append(processor.name)

    run_finished.connect(note)
    try:
        yield made
    finally:
        run_finished.disconnect(note)


def test_a_look_is_one_statement(max_age: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where each needs a connection of its own."""
    sent: list[str] = []

    def note(execute: Callable[..., object], sql: str, *arguments: object) -> object:
        sent.append(sql)
        return execute(sql, *arguments)

    def tell(name: str, news: object) -> None: ...

    def enough(**_: object) -> None:
        if len(made) == 6:
            stop.set()

    def close_and_stop() -> None:
        close_old_connections()
        stop.set()

    plan, stop = Plan(interval=0.1, deadline=time.monotonic() + PATIENCE), Stop()
    with runs() as made, connection.execute_wrapper(note):
        run_finished.connect(enough)
        Watch([deliver, weigh], plan, stop, tell).run()
        run_finished.disconnect(enough)
        assert stop.is_set()
        assert set(made) == {deliver.name, weigh.name}
        looks = len(made)
        stop = Stop()
        # The last wait of the two may have been too short for it, this one cannot be.
        plan = Plan(interval=60, deadline=time.monotonic() + PATIENCE)
        monkeypatch.setattr(watch_module, "close_old_connections", close_and_stop)
        Watch([deliver], plan, stop, tell).run()
    assert stop.is_set()
    assert made[looks:] == [deliver.name]
    assert len(sent) == len(made), sent
    assert all(sql.startswith("SELECT ") for sql in sent)
    assert (connection.connection is None) == (max_age == 0)


@pytest.mark.parametrize("listen", [False, True])
def test_between_two_looks_it_sleeps(monkeypatch: pytest.MonkeyPatch, listen: bool) -> None:
    """It only wakes for a moment each 0.2 s, and where it listens, on what comes."""
    stop, waits = Stop(), list[tuple[int, float]]()

    def wait(files: list[Any], pause: float) -> list[Any]:
        waits.append((len(files), pause))
        if len(waits) == 10:
            stop.set()
        return []

    monkeypatch.setattr(watch_module, "connection", SimpleNamespace(wait=wait))
    with runs() as made:
        Watch([deliver], Plan(interval=600, listen=listen), stop, lambda *_: None).run()
    assert waits == [(int(listen), POLL_IDLE)] * 10
    assert 1 <= len(made) <= 2 + listen
