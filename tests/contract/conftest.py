"""What the databases of the contract suite have beside the models' tables."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connection

from dcl_processor.engine import limits
from dcl_processor.engine.source import Source
from tests.contract.support.clocks import Clock
from tests.contract.support.errands import our_threads
from tests.contract.support.gate import HAS_GATE, HAS_ROW_LOCKS, INSTALL_GATE
from tests.contract.support.heartbeat import beat_soon
from tests.contract.support.messages import SENDS_SEVERAL

# What it shows happens between a statement's snapshot and its lock.
collect_ignore = [] if HAS_GATE else ["test_shapes_wanted.py"]
if not SENDS_SEVERAL:
    collect_ignore += ["test_interrupted_lines.py", "test_one_message.py"]
if connection.vendor == "mysql":
    collect_ignore += [
        "test_groups.py",
        "test_groups_beside.py",
        "test_groups_many.py",
        "test_groups_and_options.py",
    ]  # refused there
else:
    collect_ignore += ["test_groups_refused.py"]
if not HAS_GATE:
    collect_ignore += ["test_groups_race.py"]  # advisory locks
if HAS_ROW_LOCKS:
    collect_ignore += ["test_busy_reads.py"]  # a read never waits
else:
    # No lock there ends with a session, and all other writers wait for a handler.
    collect_ignore += ["test_caught_errors.py"]
if connection.vendor == "sqlite":
    collect_ignore += ["test_letters.py"]  # its texts have all letters

OPEN_PARCELS = """
    CREATE OR REPLACE VIEW tests_openparcel AS SELECT id, depot_id, sent, note FROM tests_parcel
    WHERE EXISTS (SELECT 1 FROM tests_depot WHERE tests_depot.id = depot_id AND tests_depot.open)
"""

INSTALL = {"postgresql": [INSTALL_GATE, OPEN_PARCELS], "mysql": [OPEN_PARCELS], "sqlite": []}


@pytest.fixture(scope="session", autouse=True)
def functions(django_db_setup: None, django_db_blocker: Any) -> None:
    """Make the gate, and the view that a question uses."""
    with django_db_blocker.unblock(), connection.cursor() as cursor:
        for statement in INSTALL[connection.vendor]:
            cursor.execute(statement)


@pytest.fixture
def choosing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a run choose from its first claim on, as if it had met another copy before."""
    monkeypatch.setattr(Source, "_among_others", True)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Let a run go by a clock that the test puts forward."""
    clock = Clock()
    monkeypatch.setattr(limits, "time", clock)
    return clock


@pytest.fixture
def beats_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let heartbeats come at once."""
    beat_soon(monkeypatch)


@pytest.fixture
def interrupt() -> Iterator[Callable[[], None]]:
    """Press Ctrl-C, from whatever thread."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield lambda: os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    """See that a test's runs leave no thread behind."""
    yield
    assert our_threads() == []
