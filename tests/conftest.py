"""What every test file shares."""

from __future__ import annotations

import os
from collections.abc import Generator

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
