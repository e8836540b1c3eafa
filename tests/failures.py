"""What ``tests/suite.py`` gets to know of each test that failed in a stage, which is a process.

``FAILURES`` names the file, with one JSON object in each line.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.environments import CHECKOUT
from tests.waiting import Late

#: Tests that look for a race: one that they found may be late the next time, and still is a fault.
SEARCHES = {"chaos", "crash", "explorer", "fuzz", "race"}
LOG_LINES = 5
#: Taken out of the environment, for a test may run pytest itself.
_FILE = os.environ.pop("FAILURES", None)


@dataclass(frozen=True)
class Failure:
    """A test that failed: where, with which error, and what it had logged last."""

    test: str
    error: str
    where: str = ""
    log: tuple[str, ...] = ()
    late: bool = False


def read(path: Path) -> list[Failure]:
    """Return the failures of a stage in their order."""
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [Failure(**{**line, "log": tuple(line["log"])}) for line in lines]


def write(failure: Failure) -> None:
    """Add one to the file, if one is asked for."""
    if _FILE is not None:
        with Path(_FILE).open("a") as file:
            file.write(json.dumps(asdict(failure)) + "\n")


def of(item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport) -> Failure:
    """Describe the failure of a test."""
    error, where, late = str(report.longrepr).strip().splitlines()[-1], "", False
    if call.excinfo is not None and not hasattr(report, "wasxfail"):
        error = call.excinfo.exconly(tryshort=True)
        late = call.excinfo.errisinstance((Late, subprocess.TimeoutExpired))
        where = _where(call.excinfo)
    printed = [line for _, text in report.sections for line in text.splitlines() if line.strip()]
    return Failure(
        test=item.nodeid,
        error=error,
        where=where,
        log=tuple(printed[-LOG_LINES:]),
        late=late and SEARCHES.isdisjoint(Path(item.nodeid.partition("::")[0]).parts),
    )


def _where(excinfo: pytest.ExceptionInfo[Any]) -> str:
    """Return file, line and statement of the last of our own frames."""
    for entry in reversed(excinfo.traceback):
        path = Path(str(entry.path))
        name = str(path.relative_to(CHECKOUT)) if path.is_relative_to(CHECKOUT) else "."
        if not name.startswith("."):  # an environment lies in such a folder
            is_code = path.suffix == ".py"  # a page is not parsed
            line = str(entry.statement).strip().splitlines()[0] if is_code else ""
            return f"{name}:{entry.lineno + 1}: {line}"
    return ""
