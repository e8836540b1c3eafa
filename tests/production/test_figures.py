"""The figures can be measured again; those that are counts are the same wherever it is done."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from tests.environments import CHECKOUT
from tests.waiting import PATIENCE


def test_the_sessions_of_one_copy_are_those_on_the_page() -> None:
    variables = {name: value for name, value in os.environ.items() if name != "DATABASE_URL"}
    ran = subprocess.run(
        [sys.executable, "-m", "tests.production.figures", "connections"],
        env=variables,
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert ran.returncode == 0, ran.stderr
    counts = dict(re.findall(r"sessions of one copy, (.*): (\d+)", ran.stdout))
    assert list(counts.values()) == ["1", "2", "3"]
    page = (CHECKOUT / "docs" / "howto" / "production.md").read_text(encoding="utf-8")
    table = page[page.index("| one worker | sessions |") :]
    assert re.findall(r"\| (\d)(?: more)? \|", table)[:3] == ["1", "2", "1"]
