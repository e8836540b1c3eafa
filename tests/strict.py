"""Fails a run that did less than it should, and writes down each failure of a test or a page.

The root ``conftest.py`` loads it. With CI=true nothing may be left out: no skip, no expected
failure, no deselected test. The options say on what a stage of ``tests/stages.toml`` runs, and how
many tests it has. ``STAGE_LIMIT`` has the seconds after which the process ends, and ``STACKS`` the
file for what its threads did then.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import sys
import warnings
from collections.abc import Generator, Sequence
from typing import Any

import django
import pytest
from django.db import connection

from tests import failures

IN_CI = os.environ.get("CI") == "true"
LEFT_OUT = "with CI=true every test must run"


class Count:
    """Counts the tests of one session: a hook that gets a report alone does not know its own."""

    def __init__(self) -> None:
        self.begun = 0
        self.deselected = 0
        self.complaints: list[str] = []

    def pytest_runtest_logstart(self) -> None:
        self.begun += 1

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        self.deselected += len(items)


COUNT = pytest.StashKey[Count]()
FAILED = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("strict")
    group.addoption("--expect-database", help="refuse to run on another database")
    group.addoption("--expect-django", help="refuse to run with another Django")
    group.addoption("--expect-tests", type=int, help="fail if it is another number of tests")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[COUNT] = Count()
    config.pluginmanager.register(config.stash[COUNT])


def pytest_sessionstart(session: pytest.Session) -> None:
    database, release = (session.config.getoption(f"--expect-{n}") for n in ("database", "django"))
    if database and connection.vendor != database:
        raise pytest.UsageError(f"expected to run on {database}, got {connection.vendor}")
    if release and not django.__version__.startswith(f"{release}."):
        raise pytest.UsageError(f"expected Django {release}, got {django.__version__}")
    if limit := os.environ.pop("STAGE_LIMIT", None):
        stacks = os.open(os.environ["STACKS"], os.O_WRONLY | os.O_CREAT)
        faulthandler.dump_traceback_later(float(limit), exit=True, file=stacks)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail a test in CI that is skipped, or whose failure is expected."""
    report = yield
    expected = hasattr(report, "wasxfail")
    if IN_CI and not report.failed and (report.skipped or expected):
        kind = "Expected to fail" if expected else "Skipped"
        report.outcome = "failed"
        report.longrepr = f"{kind}, but {LEFT_OUT}: {report.longrepr}"
        if expected:
            del report.wasxfail  # pytest's exit code goes by it
    if report.failed:
        item.stash[FAILED] = True
        failures.write(failures.of(item, call, report))
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    """Collect what a failed test left open, or it would fail the test that happens to do so."""
    yield
    if item.stash.get(FAILED, False):
        # The traceback that Python and pytest keep for a debugger holds the test's objects.
        for name in ("last_exc", "last_type", "last_value", "last_traceback"):
            vars(sys).pop(name, None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Do the same for a module that skips itself while it is read."""
    report = yield
    if IN_CI and report.skipped:
        report.outcome = "failed"
        report.longrepr = f"Skipped, but {LEFT_OUT}: {report.longrepr}"
    if report.failed:
        last = str(report.longrepr).strip().splitlines()[-1:]
        failures.write(failures.Failure(report.nodeid or "collection", "".join(last)))
    return report


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    count, tests = config.stash[COUNT], config.getoption("--expect-tests")
    if tests is not None and count.begun != tests:
        count.complaints.append(
            f"expected {tests} tests, got {count.begun}: if they are meant to be as many, "
            "write the number into tests/stages.toml"
        )
    if IN_CI and count.deselected:
        count.complaints.append(f"{count.deselected} tests were deselected, but {LEFT_OUT}")
    for complaint in count.complaints:
        failures.write(failures.Failure("the number of tests", complaint))
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    for complaint in config.stash[COUNT].complaints:
        terminalreporter.write_line(f"FAILED: {complaint}.", red=True)
