"""What the tests of crashes share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from django.db import connection

from tests.crash import victims
from tests.notes import notes_apart

# There is no server whose sessions could end; and the statements that are counted are PostgreSQL's.
collect_ignore = {
    "sqlite": ["test_sessions.py", "test_cut.py", "test_terminations.py"],
    "postgresql": [],
}.get(connection.vendor, ["test_terminations.py"])


@pytest.fixture(scope="package", autouse=True)
def _notes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Have the notes of the rows at hand in a folder of these tests alone."""
    with notes_apart(tmp_path_factory):
        yield


@pytest.fixture(scope="package")
def nursery(django_db_setup: None, _notes: None) -> None:
    """Have the process ready from which victims are forked."""
    victims.get_ready()


@pytest.fixture
def audit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the file to which each handler adds its row."""
    path = tmp_path / "audit"
    path.touch()
    monkeypatch.setenv("AUDIT", str(path))
    return str(path)
