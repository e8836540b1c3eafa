"""The share of the suite's longest parts that one run does.

Two things take too long for each run: searches that try every point of something, and the same
tests on another database or Django. A run does a share of them, which the commit selects.

- A search tries some of its points.
- MariaDB and SQLite run each test with some of its sets of parameters, and with one at least.
- PostgreSQL runs each test with all its sets, under the Django whose turn it is. What is about
  Django runs under each, with some of the sets.

``WHOLE=1`` (``make whole``) has no shares.

``SHARE=…`` instead of the commit selects another share; a run prints its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from hashlib import sha256
from itertools import count
from pathlib import Path

import django
import pytest
from django.db import connection

CHECKOUT = Path(__file__).resolve().parents[1]


@cache
def revision() -> str:
    """Return the commit, so that a share is the same however often CI runs it."""
    git = ["git", "-C", str(CHECKOUT), "rev-parse", "HEAD"] if shutil.which("git") else ["true"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()


def is_whole() -> bool:
    return os.environ.get("WHOLE") == "1"


def selected_by() -> str:
    """Return the text that selects the share: the commit, or the variable ``SHARE``."""
    return os.environ.get("SHARE") or revision()


def first(name: str, of: int) -> int:
    """Return the first number of the share that is called so, below ``of``."""
    digest = sha256(f"{selected_by()} {name}".encode()).digest()
    return int.from_bytes(digest[:4], "big") % of


def points(name: str, of: int) -> Iterator[int]:
    """Count without end, by ``of``: the points of the search that this run tries."""
    return count() if is_whole() else count(first(name, of), of)


def has_point(number: int, name: str, of: int) -> bool:
    """Say whether this run tries the point of the search."""
    return is_whole() or number % of == first(name, of)


# --- a plugin of pytest: the share of the sets of parameters


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("shares")
    group.addoption("--share", type=int, default=1, help="run one in so many sets of parameters")
    group.addoption("--turn", default="0/1", help="2/3: run the tests whose turn of three is 2")
    group.addoption("--always", action="append", default=[], help="run these files in each turn")


def pytest_report_header(config: pytest.Config) -> str | None:
    if is_whole():
        return None
    share, turn = config.getoption("--share"), config.getoption("--turn")
    return f"share: 1/{share} of the sets of parameters, turn {turn}; again: SHARE={selected_by()}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the tests that are always run, or whose turn it is, with a share of their sets.

    Of fewer sets than the share has, one is left. The tests of another turn run elsewhere, so
    those of this one have all their sets.
    """
    if is_whole():
        return
    most, here = config.getoption("--share"), f"{connection.vendor} {django.__version__}"
    turn, turns = map(int, config.getoption("--turn").split("/"))
    always = tuple(config.getoption("--always"))
    sets: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        sets[_subject(item)].append(item)
    left = set[pytest.Item]()
    for name, its in sets.items():
        if turns == 1 or name.startswith(always):
            of = min(most, len(its)) if name.partition("::")[0].endswith(".py") else 1
            left.update(its[first(f"{name} {here}", of) :: of])
        elif first(f"{name}, turn", turns) == turn:
            left.update(its)
    items[:] = [item for item in items if item in left]


def _subject(item: pytest.Item) -> str:
    """Name the test without its parameters; the blocks of a page need each other."""
    path, _, name = item.nodeid.partition("::")
    return f"{path}::{name.partition('[')[0]}" if path.endswith(".py") else path
