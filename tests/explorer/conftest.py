"""The gates are PostgreSQL's: elsewhere no predicate is asked between a snapshot and a lock."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from django.db import connection

from tests.contract.support.messages import separately

collect_ignore_glob = [] if connection.vendor == "postgresql" else ["*.py"]


@pytest.fixture(autouse=True)
def _statements_are_steps() -> Iterator[None]:
    """Make each statement of a message a step, because the server executes them one by one."""
    with separately():
        yield
