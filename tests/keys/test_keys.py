"""A short run of the audit, and what it finds in workers and in logs that are wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from django.db import connection

from tests.waiting import PATIENCE

from .audit import Line, Wait, judge

CHECKOUT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(
    connection.vendor != "postgresql", reason="its triggers are PostgreSQL's"
)


def run(tmp_path: Path, *options: str) -> tuple[int, str, list[dict[str, Any]]]:
    path = tmp_path / "result.json"
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "tests.keys", "--json", str(path)),
            *("--workers", "3", "--skews", "skewed", *options),
        ],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=False,
        timeout=4 * PATIENCE,
    )
    said = ended.stdout + ended.stderr
    assert path.exists(), said
    return ended.returncode, said, json.loads(path.read_text())


def test_every_delivery_and_mode_keeps_to_the_keys_in_spite_of_trouble(tmp_path: Path) -> None:
    code, said, results = run(tmp_path, "--rows", "100")
    assert code == 0, said
    assert len(results) == 12, said
    troubles: Counter[str] = Counter()
    for result in results:
        assert result["rows"] >= 100, said
        assert result["seconds"] > 0, said
        troubles.update(result["troubles"])
    assert set(+troubles) == {"commit_late", "put_back", "lock_head", "move", "renew_late"}, said


WAITS = [Wait(1, 0), Wait(2, 0), Wait(3, 1)]
RIGHT = [
    Line(1, 0, "begin", at=1, turn=0.5),
    Line(3, 1, "begin", at=1.5, turn=0.5),
    Line(1, 0, "done", at=2),
    Line(3, 1, "done", at=2.5),
    Line(2, 0, "begin", at=3, turn=2.5),
    Line(2, 0, "done", at=4),
]


def test_what_is_right_has_no_faults() -> None:
    verdict = judge(RIGHT, WAITS, most=1, in_order=True, claims=False)
    assert (verdict.faults, verdict.most) == ([], 1)
    assert verdict.handled == Counter({1: 1, 2: 1, 3: 1})


def test_two_rows_of_a_key_are_found() -> None:
    lines = [
        Line(1, 0, "begin", at=1),
        Line(2, 0, "begin", at=1.5),
        Line(1, 0, "done", at=2),
        Line(2, 0, "done", at=3),
    ]
    assert judge(lines, [], most=1, in_order=False, claims=False).faults == [
        "2 rows of key 0 were in flight, of 1"
    ]
    assert judge(lines, [], most=2, in_order=False, claims=False).faults == []
