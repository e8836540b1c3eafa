"""The list of mutants, kept as data: a fault is named by the text that it replaces.

A line number would be wrong after the next edit, and say nothing. A text that is not there exactly
once any more is an error, so that the list follows the code.
"""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
PACKAGE = Path("dcl_processor")


@dataclass(frozen=True)
class Mutant:
    """A fault in one file: ``put`` in the place of ``find``.

    ``tests``: what pytest is to run, as on its command line; ``on``: the database. ``hangs``: the
    fault may keep a test from ending, and a test that does not end finds it.
    """

    file: str
    find: str
    put: str
    tests: str
    on: str = "postgresql"
    hangs: bool = False

    def __str__(self) -> str:
        before, after = (" ⏎ ".join(each.split("\n")) for each in (self.find, self.put))
        return f"{self.file}: {before.strip()}  →  {after.strip() or '(nothing)'}"

    @property
    def path(self) -> Path:
        return PACKAGE / self.file

    def stale(self) -> str:
        """Say what is wrong with the entry, if anything."""
        text = (CHECKOUT / self.path).read_text() if (CHECKOUT / self.path).exists() else ""
        if (number := text.count(self.find)) != 1:
            return f"expected its text to be there once, got it {number} times"
        if self.find == self.put:
            return "expected another text in its place, got the same"
        try:
            compile(text.replace(self.find, self.put), self.file, "exec")
        except SyntaxError as error:
            return f"expected Python, got {error}"
        if gone := [each for each in self._named_tests() if not _is_there(each)]:
            return f"expected tests that are there, got {', '.join(gone)}"
        return ""

    def _named_tests(self) -> list[str]:
        """Return the tests of the command line, without what selects among them."""
        words = ["", *shlex.split(self.tests)]
        return [each for before, each in pairwise(words) if "-k" not in (before, each)]

    def applied(self, folder: Path) -> str:
        """Write the fault into a copy of the tree; return the text that was there."""
        before = (folder / self.path).read_text()
        (folder / self.path).write_text(before.replace(self.find, self.put))
        return before


def _is_there(test: str) -> bool:
    """Return whether there is such a file and, if one is named, such a function."""
    path, *names = test.partition("[")[0].split("::")
    file = CHECKOUT / path
    return file.exists() and (not names or f"def {names[-1]}(" in file.read_text(encoding="utf-8"))


def mutants() -> Iterator[Mutant]:
    """Read the lists, one for each room of the package."""
    for path in sorted(Path(__file__).parent.glob("*.toml")):
        for each in tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]:
            yield Mutant(**each)
