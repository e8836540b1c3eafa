"""Reads without a lock that SQLite refuses all the same, because another connection writes."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator

import pytest
from django.db import connection

from dcl_processor.pending import scan
from tests.contract.support import errands as the
from tests.contract.support.reports import assert_run
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "WINDOW", 2)
    monkeypatch.setattr(scan, "WIDE_WINDOW", 3)


@pytest.fixture
def shared_memory() -> Iterator[None]:
    """Let all threads connect to one database in memory, as Django's own test database is."""
    before = connection.settings_dict["NAME"]
    connection.close()
    # Of its own, because Django closes no connection to a database in memory.
    name = f"busy-{secrets.token_hex(4)}"
    connection.settings_dict["NAME"] = f"file:{name}?mode=memory&cache=shared"
    try:
        with connection.schema_editor() as editor:
            editor.create_model(Errand)
        yield
    finally:
        assert connection.connection is not None
        connection.connection.close()
        connection.connection = None
        connection.settings_dict["NAME"] = before


def test_the_next_window_waits_for_what_other_threads_write(shared_memory: None) -> None:
    """A table that is being written to cannot be read there, whatever the time-out is."""
    the.errands(5)
    calls: list[int] = []

    def handle(row: Errand) -> None:
        time.sleep(0.05)
        calls.append(row.place)

    report = the.at_least_once(handle)(concurrency=2, wait_for_locked=30)
    assert_run(report, processed=5)
    assert sorted(calls) == list(range(5))
