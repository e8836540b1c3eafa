"""Reads without a lock that SQLite refuses all the same, because another connection writes."""

from __future__ import annotations

import secrets
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from django.db import OperationalError, connection

from dcl_processor.candidates import scan
from tests.contract.support import errands as the
from tests.contract.support.reports import assert_run
from tests.contract.support.sessions import connected
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

    report = the.transactional(handle)(concurrency=2, wait_for_locked=30)
    assert_run(report, processed=5)
    assert sorted(calls) == list(range(5))


READS = {
    "a window": lambda sql: "LIMIT 2" in sql,
    "the highest key": lambda sql: " DESC LIMIT 1" in sql,
    "the number of rows": lambda sql: "COUNT(" in sql,
}


@pytest.mark.parametrize("read", READS.values(), ids=[*READS])
@pytest.mark.parametrize("released", [True, False], ids=["released", "kept"])
def test_a_read_waits_for_an_exclusive_lock(
    read: Any, released: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a claim does: what is locked is asked for again, and not without end."""
    monkeypatch.setattr(scan, "READ_TIMEOUT", 30 if released else 0.3)
    the.errands(12)
    refusals: list[str] = []
    path = connection.settings_dict["NAME"]
    with (
        connected({"timeout": 0}),
        closing(sqlite3.connect(path, isolation_level=None, timeout=5)) as other,
    ):
        locked: list[bool] = []

        def watch(execute: Any, sql: str, *args: Any) -> Any:
            if read(sql) and not locked:
                locked.append(True)
                other.execute("BEGIN EXCLUSIVE")
            try:
                return execute(sql, *args)
            except OperationalError:
                refusals.append(sql)
                if released and len(refusals) == 2:
                    other.rollback()
                raise

        # In the order of keys there is no need for a number of rows.
        run = the.transactional(the.ignore, strict_order=read is READS["the number of rows"])
        with connection.execute_wrapper(watch):
            if released:
                assert_run(run(), processed=12)
                assert len(refusals) == 2
            else:
                with pytest.raises(OperationalError, match="locked"):
                    run()
                assert len(refusals) > 1
    assert all(map(read, refusals))
