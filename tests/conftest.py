"""What every test file shares."""

from __future__ import annotations

import signal
from collections.abc import Generator
from typing import Any

import pytest


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


@pytest.fixture(scope="session")
def django_db_setup(django_db_setup: None) -> Generator[None]:
    """Make the test databases, and empty their tables between tests without ``flush``.

    ``TRUNCATE`` makes new files for each table, ``post_migrate`` looks up the content types and
    permissions of all apps, and a new session each table.
    """
    from django.db import connections
    from django.test import TransactionTestCase

    from tests.cleaner import Cleaner

    cleaners: dict[str, Cleaner] = {}

    def empty(test: Any) -> None:
        connections.close_all()  # a test may have left a transaction open, with its locks
        for alias in test._databases_names(include_mirrors=False):
            cleaners.setdefault(alias, Cleaner(alias)).empty()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransactionTestCase, "_fixture_teardown", empty)
        yield
    for each in cleaners.values():
        each.close()
