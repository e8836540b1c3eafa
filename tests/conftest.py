"""What every test file shares."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterable
from typing import Any

import pytest

IN_CI = os.environ.get("CI") == "true"
# It needs MariaDB's binaries, which the suite sees to where it tests on MariaDB.
collect_ignore = [] if "mysql" in os.environ.get("DATABASE_URL", "") else ["test_servers.py"]
SKIPPED_IN_CI = "Skipped, but with CI=true every test must run: "


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a skipped test into a failed one in CI, where nothing may be left out."""
    report = yield
    if IN_CI and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = SKIPPED_IN_CI + str(report.longrepr)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Do the same for a module that skips itself while it is read."""
    report = yield
    if IN_CI and report.skipped:
        report.outcome = "failed"
        report.longrepr = SKIPPED_IN_CI + str(report.longrepr)
    return report


@pytest.fixture(autouse=True, scope="session")
def _empty_tables_by_deleting() -> Generator[None]:
    """Leave out TRUNCATE between tests, which makes new files for every table there is.

    It took most of the suite's time; the few rows of a test are deleted in a fraction of that.
    """

    def sql_flush(operations: Any, style: object, tables: Iterable[str], **_: object) -> list[str]:
        names = [operations.quote_name(table) for table in tables]
        return [f"DELETE FROM {name}" for name in names]  # noqa: S608  # quoted

    # Loaded when PostgreSQL is the database of this run.
    backend = sys.modules.get("django.db.backends.postgresql.operations")
    with pytest.MonkeyPatch.context() as patch:
        if backend is not None:
            patch.setattr(backend.DatabaseOperations, "sql_flush", sql_flush)
        yield
