"""The gates are PostgreSQL's: elsewhere no predicate is asked between a snapshot and a lock."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from django.db import connection

from tests.notes import notes_apart

collect_ignore_glob = [] if connection.vendor == "postgresql" else ["*.py"]


@pytest.fixture(autouse=True)
def _notes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the notes of these runs from other tests."""
    with notes_apart(tmp_path_factory):
        yield
