"""Takes part in the heartbeats of a run, which come on a connection of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event, current_thread
from types import SimpleNamespace
from typing import Any

import pytest
from django.db.backends.signals import connection_created

from dcl_processor.engine import heartbeat
from tests.contract.support.gate import HAS_ROW_LOCKS
from tests.waiting import wait


@dataclass
class Beat:
    """One statement of a heartbeat, held until it is let go."""

    came: Event = field(default_factory=Event)
    go: Event = field(default_factory=Event)


def beat_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let heartbeats come at once: a lease that is renewed may be long, and lapses in no test."""

    class Soon(Event):
        def wait(self, timeout: float | None = None) -> bool:
            return super().wait(None if timeout is None else 0.05)

    monkeypatch.setattr(
        heartbeat, "threading", SimpleNamespace(**{**vars(threading), "Event": Soon})
    )


def begins_to_write(sql: str) -> bool:
    """Recognise the first statement by which a heartbeat may change or hold anything."""
    return " FOR " in sql if HAS_ROW_LOCKS else sql.startswith("UPDATE")


def writes(sql: str) -> bool:
    return sql.startswith("UPDATE")


@contextmanager
def held_beat(
    where: Callable[[str], bool], first: Callable[[Any], None] = lambda connection: None
) -> Iterator[Beat]:
    """Hold the first heartbeat statement that ``where`` recognises, once ``first`` was called."""
    beat = Beat()

    def wrapper(execute: Callable[..., Any], sql: str, *args: Any) -> Any:
        if where(sql) and not beat.came.is_set():
            first(args[-1]["connection"])
            beat.came.set()
            wait(beat.go)
        return execute(sql, *args)

    with beats_through(wrapper):
        try:
            yield beat
        finally:
            beat.go.set()


@contextmanager
def beats_through(wrapper: Callable[..., Any]) -> Iterator[None]:
    """Let the statements of heartbeats go through a wrapper of Django's."""

    def watch(connection: Any, **_: Any) -> None:
        if current_thread().name.endswith(": leases"):
            connection.execute_wrappers.append(wrapper)

    connection_created.connect(watch)
    try:
        yield
    finally:
        connection_created.disconnect(watch)
