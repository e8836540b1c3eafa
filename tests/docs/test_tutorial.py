"""Follow the tutorial to the letter, in an empty folder and a database of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from django.db import connection

from tests.docs.reader import Reader, empty_database


@pytest.fixture
def database_url(transactional_db: None) -> Iterator[str]:
    """Give the URL of an empty database, as django-environ reads it."""
    settings = connection.settings_dict
    user, password, host = (quote(settings[part], safe="") for part in ("USER", "PASSWORD", "HOST"))
    # A socket's folder is where django-environ looks for it: in the path.
    port = settings["PORT"] or 5432
    place = f":{port}/{host}" if settings["HOST"].startswith("/") else f"{host}:{port}"
    with empty_database("tutorial") as name:
        yield f"postgres://{user}:{password}@{place}/{name}"


def test_every_step_does_what_the_page_says(tmp_path: Path, database_url: str) -> None:
    Reader("tutorial.md", tmp_path, {"DATABASE_URL": database_url}).follow()
    assert len(list((tmp_path / "printed").iterdir())) == 62
