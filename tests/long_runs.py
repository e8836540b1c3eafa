"""What of ``make long`` is green, stage by stage: ``tests/long.toml``.

A stage that is green at this very code is not run again. So a run that was ended goes on, and one
that was red needs its red stages alone.
"""

from __future__ import annotations

import subprocess
import tomllib
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from threading import Lock

from tests.environments import CHECKOUT

LONG = CHECKOUT / "tests" / "long.toml"
#: All other files.
OTHERS = ("--", ".", ":!tests/long.toml")

_writing = Lock()


@cache
def code() -> str:
    """Return the last commit of all other files; ``""`` if they have changed since."""
    if _git("status", "--porcelain", *OTHERS):
        return ""
    return _git("log", "-1", "--format=%H", *OTHERS)


def _git(*arguments: str) -> str:
    git = ["git", "-C", str(CHECKOUT), *arguments]
    return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()


def _green() -> dict[str, dict[str, str]]:
    return tomllib.loads(LONG.read_text()) if LONG.exists() else {}


def is_green(name: str) -> bool:
    """Return whether the stage was green at this very code."""
    return bool(code()) and _green().get(name, {}).get("commit") == code()


def write_down(name: str) -> None:
    """Note that the stage is green at this code."""
    if not code():
        return
    with _writing:
        said = {
            **_green(),
            name: {"at": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", "commit": code()},
        }
        tables = [
            f'["{stage}"]\nat = "{it["at"]}"\ncommit = "{it["commit"]}"\n'
            for stage, it in said.items()
        ]
        LONG.write_text("\n".join(["# The last green run of each stage of make long.", *tables]))


def age(names: Sequence[str]) -> str:
    """Say when each of these stages was green."""
    known = _green()
    if never := [name for name in names if name not in known]:
        return f"make long: no green run is written down of {', '.join(never)}"
    oldest = min(names, key=lambda name: known[name]["at"])
    at, commit = known[oldest]["at"], known[oldest]["commit"]
    days = (datetime.now(UTC) - datetime.fromisoformat(at)).days
    return f"make long: its oldest green stage, {oldest}, is {days} days old, at {commit[:9]}"
