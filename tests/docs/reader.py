"""A reader who does what a page says: writes the files it shows, and types its commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from django.core.management import call_command
from django.db import connection
from sybil import Document, Example
from sybil.parsers.myst import CodeBlockParser

from tests.docs.blocks import EXIT_CODE, caption, commands
from tests.docs.output import difference
from tests.edge.manage import on_a_terminal
from tests.environments import CHECKOUT

AT_THE_END = ", at the end"

#: What a reader adds to the settings that ``startproject`` has made.
SETTINGS = """
from environ import Env

INSTALLED_APPS += ["dcl_processor", "{app}"]
DATABASES = {{"default": Env().db_url("DATABASE_URL")}}
"""


def append(folder: Path, settings: str) -> None:
    with (folder / "office" / "settings.py").open("a", encoding="utf-8") as file:
        file.write(settings)


def project(folder: Path, app: str) -> None:
    """Make the project ``office`` with an empty app."""
    call_command("startproject", "office", str(folder))
    append(folder, SETTINGS.format(app=app))
    (folder / app).mkdir()
    call_command("startapp", app, str(folder / app))


class Reader:
    """Follows a page in a folder, where the commands get these variables."""

    def __init__(self, page: str, folder: Path, variables: Mapping[str, str]) -> None:
        self.page = CHECKOUT / "docs" / page
        self.folder = folder
        self.environment = {
            **os.environ,
            "DJANGO_COLORS": "nocolor",
            "TERM": "dumb",  # one that cannot draw a progress bar
            # What the page installs is here already.
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(CHECKOUT),
            **variables,
        }
        del self.environment["DJANGO_SETTINGS_MODULE"]  # the suite's own
        self.exit_code = 0
        #: The blocks that say how something is started, as they stand.
        self.starts: list[str] = []

    def follow(self) -> None:
        """Do everything, from top to bottom; programs that stay are left to the test."""
        self.evaluate(
            CodeBlockParser("python", self.write),
            CodeBlockParser("console", self.type),
            CodeBlockParser("sh", self.remember),
        )

    def write_files(self) -> None:
        """Write the files alone."""
        self.evaluate(CodeBlockParser("python", self.write))

    def type_commands(self) -> None:
        """Type the commands alone."""
        self.evaluate(CodeBlockParser("console", self.type))

    def evaluate(self, *parsers: CodeBlockParser) -> None:
        for step in Document.parse(str(self.page), *parsers).examples():
            step.evaluate()

    def write(self, example: Example) -> None:
        if (name := caption(example)) is None:
            return  # executed where it stands
        path = self.folder / name.removesuffix(AT_THE_END)
        with path.open("a" if name.endswith(AT_THE_END) else "w", encoding="utf-8") as file:
            file.write(example.parsed)

    def type(self, example: Example) -> None:
        for command, shown in commands(example.parsed):
            output = f"{self.exit_code}\n" if command == EXIT_CODE else self.run(command[2:])
            problem = difference(shown, output)
            assert problem is None, f"{self.page.name}, line {example.line}: {command}: {problem}"

    def remember(self, example: Example) -> None:
        self.starts.append(example.parsed.strip())

    def run(self, command: str) -> str:
        """Run a command on a terminal; return what it printed there."""
        shell = ["/bin/sh", "-c", command]
        self.exit_code, printed = on_a_terminal(shell, self.folder, self.environment)
        # What the bar leaves on such a terminal.
        return printed.replace("\r\n", "\n").removeprefix("\n")


@contextmanager
def empty_database(suffix: str) -> Iterator[str]:
    """Make an empty database beside the suite's, give its name, and drop it afterwards."""
    name = f"{connection.settings_dict['NAME']}_{suffix}"
    with connection.cursor() as cursor:
        cursor.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')
        cursor.execute(f'CREATE DATABASE "{name}"')
        try:
            yield name
        finally:
            cursor.execute(f'DROP DATABASE "{name}" WITH (FORCE)')


@contextmanager
def connected(name: str) -> Iterator[Any]:
    """Connect to another database of the suite's server."""
    # Not an alias of its own, to which Django's test case allows no connection.
    other = connection.copy()
    other.settings_dict["NAME"] = name
    try:
        yield other
    finally:
        other.close()
