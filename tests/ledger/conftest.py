"""Switches the ledger on, and ends its thread with the test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connection
from django.test import override_settings

from dcl_processor.ledger import ledger as process
from tests.contract.support.gate import HAS_ROW_LOCKS

# Commands, whose handlers work in a transaction, and what PostgreSQL does with pages.
collect_ignore = (
    [] if connection.vendor == "postgresql" else ["test_commands.py", "test_heap_only.py"]
)
# The ledger has a thread and a session of its own.
collect_ignore += [] if HAS_ROW_LOCKS else ["test_desk.py", "test_races.py"]


@pytest.fixture(autouse=True)
def ledger(monkeypatch: pytest.MonkeyPatch) -> Iterator[process.Ledger]:
    """Give the test a ledger of its own, as a new process has it."""
    fresh = process.Ledger()
    monkeypatch.setattr(process, "_ledger", fresh)
    with override_settings(DCL_PROCESSOR_LEDGER=True):
        yield fresh
    fresh.desk.close()


@pytest.fixture
def other_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that makes the ledger of another process, for a thread of its own."""
    made: list[process.Ledger] = []

    def make() -> process.Ledger:
        made.append(process.Ledger())
        return made[-1]

    yield make
    for each in made:
        each.desk.close()
