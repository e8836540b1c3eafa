"""Follow the tutorial to the letter, in an empty folder and a database of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.reader import Reader, empty_database, url_of


@pytest.mark.django_db(transaction=True)
def test_every_step_does_what_the_page_says(tmp_path: Path) -> None:
    with empty_database("tutorial") as name:
        Reader("tutorial.md", tmp_path, {"DATABASE_URL": url_of(name)}).follow()
    assert len(list((tmp_path / "printed").iterdir())) == 62
