"""What every test file shares."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Generator, Iterable
from typing import Any

import pytest

# It needs MariaDB's binaries, which the suite sees to where it tests on MariaDB.
collect_ignore = [] if "mysql" in os.environ.get("DATABASE_URL", "") else ["test_servers.py"]

#: What migrations put into the test database, the same for every test.
KEPT = {"django_content_type", "auth_permission"}


@pytest.fixture(autouse=True, scope="session")
def _signals_as_in_a_terminal() -> Generator[None]:
    """Let the commands that tests start get the signals that ``nohup`` and ``&`` leave ignored."""
    ignored = [
        each
        for each in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
        if signal.getsignal(each) is signal.SIG_IGN
    ]
    for each in ignored:
        python = signal.default_int_handler if each == signal.SIGINT else signal.SIG_DFL
        signal.signal(each, python)
    yield
    for each in ignored:
        signal.signal(each, signal.SIG_IGN)


@pytest.fixture(autouse=True, scope="session")
def _empty_tables_cheaply() -> Generator[None]:
    """Empty the tables between tests without the parts of ``flush`` that no test here needs.

    ``TRUNCATE`` makes new files for each table, and ``post_migrate`` looks up the content types
    and permissions of all apps: together they took most of the suite's time.
    """
    from django.core.management.commands import flush

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flush, "emit_post_migrate_signal", lambda *_, **__: None)
        for vendor in ("postgresql", "mysql", "sqlite3"):
            # Loaded when it is the database of this run.
            if backend := sys.modules.get(f"django.db.backends.{vendor}.operations"):
                operations: Any = backend.DatabaseOperations
                patch.setattr(operations, "sql_flush", _sql_flush(vendor, operations.sql_flush))
        yield


def _sql_flush(vendor: str, original: Callable[..., list[str]]) -> Callable[..., list[str]]:
    def sql_flush(
        operations: Any, style: object, tables: Iterable[str], **options: Any
    ) -> list[str]:
        emptied = [table for table in tables if table not in KEPT]
        if vendor != "postgresql":
            return original(operations, style, emptied, **options)
        names = [operations.quote_name(table) for table in emptied]
        # One round trip: psycopg sends statements without parameters as one message.
        return ["; ".join(f"DELETE FROM {name}" for name in names)]  # noqa: S608  # quoted

    return sql_flush
