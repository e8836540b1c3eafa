"""Fails a run that did less than it should; the root ``conftest.py`` loads it for tests and pages.

With CI=true nothing may be left out: no skip, no expected failure, no deselected test. The options
say on what a stage of ``tests/suite.py`` runs, and how many tests have to pass at least.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from typing import Any

import django
import pytest
from django.db import connection

IN_CI = os.environ.get("CI") == "true"
LEFT_OUT = "with CI=true every test must run"


class Count:
    """Counts the tests of one session: a hook that gets a report alone does not know its own."""

    def __init__(self) -> None:
        self.passed = 0
        self.deselected = 0
        self.complaints: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed += report.when == "call" and report.passed

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        self.deselected += len(items)


COUNT = pytest.StashKey[Count]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("strict")
    group.addoption("--expect-database", help="refuse to run on another database")
    group.addoption("--expect-django", help="refuse to run with another Django")
    group.addoption("--expect-passed", type=int, default=0, help="fail if fewer tests pass")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[COUNT] = Count()
    config.pluginmanager.register(config.stash[COUNT])


def pytest_sessionstart(session: pytest.Session) -> None:
    database, release = (session.config.getoption(f"--expect-{n}") for n in ("database", "django"))
    if database and connection.vendor != database:
        raise pytest.UsageError(f"expected to run on {database}, got {connection.vendor}")
    if release and not django.__version__.startswith(f"{release}."):
        raise pytest.UsageError(f"expected Django {release}, got {django.__version__}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail a test in CI that is skipped, or whose failure is expected."""
    report = yield
    expected = hasattr(report, "wasxfail")
    if IN_CI and not report.failed and (report.skipped or expected):
        kind = "Expected to fail" if expected else "Skipped"
        report.outcome = "failed"
        report.longrepr = f"{kind}, but {LEFT_OUT}: {report.longrepr}"
        if expected:
            del report.wasxfail  # pytest's exit code goes by it
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Do the same for a module that skips itself while it is read."""
    report = yield
    if IN_CI and report.skipped:
        report.outcome = "failed"
        report.longrepr = f"Skipped, but {LEFT_OUT}: {report.longrepr}"
    return report


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    count, least = config.stash[COUNT], config.getoption("--expect-passed")
    if count.passed < least:
        count.complaints.append(f"expected at least {least} tests to pass, got {count.passed}")
    if IN_CI and count.deselected:
        count.complaints.append(f"{count.deselected} tests were deselected, but {LEFT_OUT}")
    if count.complaints:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    for complaint in config.stash[COUNT].complaints:
        terminalreporter.write_line(f"FAILED: {complaint}.", red=True)
