"""The share of the suite's longest parts that one run does.

Two things take too long for each run: searches that try every point of something, and the same
tests on another database or Django. A run does a share of them, which the commit selects.

- A search tries some of its points.
- MariaDB, SQLite and the other Djangos run each test with some of its sets of parameters, and with
  one at least. The number of the sets is the same for each commit.

``WHOLE=1`` (``make long``) has no shares.

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

import django
import pytest
from django.db import connection

from tests.environments import CHECKOUT


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
    group.addoption("--whole", action="append", default=[], help="run these files with all sets")


def pytest_report_header(config: pytest.Config) -> str | None:
    share = config.getoption("--share")
    if is_whole() or share == 1:
        return None
    return f"share: 1/{share} of the sets of parameters; again: SHARE={selected_by()}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave each test a share of its sets; of fewer sets than the share has, one is left."""
    share, here = config.getoption("--share"), f"{connection.vendor} {django.__version__}"
    if is_whole() or share == 1:
        return
    sets: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        sets[_subject(item)].append(item)
    left = set[pytest.Item]()
    for name, its in sets.items():
        whole = name.startswith(tuple(config.getoption("--whole")))
        begin, of = first(f"{name} {here}", len(its)), 1 if whole else share
        left.update(its[(begin + at) % len(its)] for at in range(0, len(its), of))
    items[:] = [item for item in items if item in left]


def _subject(item: pytest.Item) -> str:
    """Name the test without its parameters."""
    path, _, name = item.nodeid.partition("::")
    return f"{path}::{name.partition('[')[0]}"
