"""What the tests of crashes share."""

from __future__ import annotations

from pathlib import Path

import pytest
from django.db import connection

from tests.crash import victims

# There is no server whose sessions could end.
collect_ignore = ["test_sessions.py", "test_cut.py"] if connection.vendor == "sqlite" else []


@pytest.fixture(scope="session")
def nursery(django_db_setup: None) -> None:
    """Have the process ready from which victims are forked."""
    victims.get_ready()


@pytest.fixture
def audit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the file to which each handler adds its row."""
    path = tmp_path / "audit"
    path.touch()
    monkeypatch.setenv("AUDIT", str(path))
    return str(path)
