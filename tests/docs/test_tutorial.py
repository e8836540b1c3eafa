"""Follow the tutorial to the letter, in an empty folder and a database of its own."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from django.db import connection
from sybil import Document, Example
from sybil.parsers.myst import CodeBlockParser

from tests.docs.blocks import EXIT_CODE, commands
from tests.docs.output import difference

CHECKOUT = Path(__file__).resolve().parents[2]
TUTORIAL = CHECKOUT / "docs" / "tutorial.md"
AT_THE_END = ", at the end"


class Reader:
    """Does what the page says: writes the files it shows, and types its commands."""

    def __init__(self, folder: Path, database_url: str) -> None:
        self.folder = folder
        self.environment = {
            **os.environ,
            "DATABASE_URL": database_url,
            "DJANGO_COLORS": "nocolor",
            "TERM": "dumb",  # one that cannot draw a progress bar
            # What the page installs is here already.
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(CHECKOUT),
        }
        del self.environment["DJANGO_SETTINGS_MODULE"]  # the suite's own
        self.exit_code = 0

    def write(self, example: Example) -> None:
        caption = example.region.lexemes["options"]["caption"]
        path = self.folder / caption.removesuffix(AT_THE_END)
        with path.open("a" if caption.endswith(AT_THE_END) else "w", encoding="utf-8") as file:
            file.write(example.parsed)

    def type(self, example: Example) -> None:
        for command, shown in commands(example.parsed):
            output = f"{self.exit_code}\n" if command == EXIT_CODE else self.run(command[2:])
            problem = difference(shown, output)
            assert problem is None, f"tutorial.md, line {example.line}: {command}: {problem}"

    def run(self, command: str) -> str:
        """Run a command on a terminal; return what it printed there."""
        terminal, screen = pty.openpty()
        process = subprocess.Popen(
            ["/bin/sh", "-c", command],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=screen,
            stderr=screen,
        )
        os.close(screen)
        printed = b"".join(_read(terminal)).decode().replace("\r\n", "\n")
        self.exit_code = process.wait(timeout=60)
        return printed.removeprefix("\n")  # what the bar leaves on such a terminal


def _read(terminal: int) -> Iterator[bytes]:
    # Linux says that the other end was closed with an error, others with an empty read.
    try:
        while chunk := os.read(terminal, 65536):
            yield chunk
    except OSError:
        pass
    finally:
        os.close(terminal)


@pytest.fixture
def database_url(transactional_db: None) -> Iterator[str]:
    """Make an empty database beside the suite's, and drop it afterwards."""
    settings = connection.settings_dict
    name = f"{settings['NAME']}_tutorial"
    with connection.cursor() as cursor:
        cursor.execute(f'CREATE DATABASE "{name}"')
        user, password, host = (
            quote(settings[part], safe="") for part in ("USER", "PASSWORD", "HOST")
        )
        # A socket's folder is where django-environ looks for it: in the path.
        port = settings["PORT"] or 5432
        place = f":{port}/{host}" if settings["HOST"].startswith("/") else f"{host}:{port}"
        yield f"postgres://{user}:{password}@{place}/{name}"
        cursor.execute(f'DROP DATABASE "{name}" WITH (FORCE)')


def test_every_step_does_what_the_page_says(tmp_path: Path, database_url: str) -> None:
    reader = Reader(tmp_path, database_url)
    steps = Document.parse(
        str(TUTORIAL),
        CodeBlockParser("python", reader.write),
        CodeBlockParser("console", reader.type),
    )
    for step in steps.examples():
        step.evaluate()
    assert len(list((tmp_path / "printed").iterdir())) == 62
