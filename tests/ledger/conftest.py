"""Switches the ledger on, and lets it forget what it knows of runs and errors before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from django.db import connection
from django.test import override_settings

from dcl_processor.ledger import run

# Commands, whose handlers work in a transaction.
collect_ignore = [] if connection.vendor == "postgresql" else ["test_commands.py"]


@pytest.fixture(autouse=True)
def ledger(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the test begin as a new process does."""
    monkeypatch.setattr(run, "_last", run._Last())
    monkeypatch.setattr(run, "_paused", {})
    monkeypatch.setattr(run._Silence, "until", 0.0)
    with override_settings(DCL_PROCESSOR_LEDGER=True):
        yield
