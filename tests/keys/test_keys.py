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
            *("--copies", "3", "--skews", "skewed", *options),
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


@pytest.mark.parametrize("delivery", ["transactional", "at_least_once"])
def test_workers_that_lock_no_key_are_found(tmp_path: Path, delivery: str) -> None:
    # Whether two workers meet is chance.
    for _ in range(5):
        options = ("--rows", "40", "--work", "0.01", "--only", delivery, "--modes", "by_key")
        code, said, [result] = run(tmp_path, "--broken", *options)
        assert code == bool(result["faults"]), said
        if code:
            break
    assert "rows of key 0 were in flight, of 1" in said


def found(
    lines: list[Line], waits: list[Wait], *, most: int = 1, claims: bool = False
) -> list[str]:
    return judge(lines, waits, most=most, in_order=True, claims=claims).faults


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


def test_a_row_that_was_overtaken_is_found() -> None:
    swapped = [
        Line(2, 0, "begin", at=1, turn=0.5),
        Line(2, 0, "done", at=2),
        Line(1, 0, "begin", at=3, turn=2.5),
        Line(1, 0, "done", at=4),
    ]
    overtaken = ["row 2 of key 0 was handled before row 1"]
    assert found(swapped, WAITS) == overtaken
    # It came before the worker asked for the key, or meanwhile.
    assert found(swapped, [Wait(1, 0, came=0.1, since=0.2), Wait(2, 0)]) == overtaken
    assert found(swapped, [Wait(1, 0, came=0.1, since=0.7), Wait(2, 0)]) == []
    # It was moved to another key, before or after.
    assert found(swapped, [Wait(1, 0, until=0.7), Wait(1, 1, came=0.7, since=0.8)]) == []
    assert found(swapped, [Wait(1, 0, until=1.5), Wait(1, 1, came=1.5, since=1.6)]) == overtaken


def test_a_row_that_was_put_back_may_be_overtaken_no_more() -> None:
    again = [
        *RIGHT[:5],
        Line(2, 0, "done", at=4),
        Line(1, 0, "begin", at=5, turn=4.5),
        Line(1, 0, "done", at=6),
    ]
    assert found(again, [*WAITS, Wait(1, 0, came=2.6, since=2.7)]) == []
    assert found(again, [*WAITS, Wait(1, 0, came=2.2, since=2.3)]) == [
        "row 2 of key 0 was handled before row 1"
    ]


def test_a_lease_holds_its_key_until_it_lapses_is_renewed_or_is_taken_away() -> None:
    def in_flight(*lines: Line) -> int:
        return judge(lines, [], most=0, in_order=False, claims=True).most

    held = Line(1, 0, "held", at=1, until=5)
    assert in_flight(held, Line(2, 0, "held", at=4, until=9)) == 2
    assert in_flight(held, Line(2, 0, "held", at=5, until=9)) == 1
    renewed = Line(1, 0, "held", at=3, until=7)
    assert in_flight(held, renewed, Line(2, 0, "held", at=6, until=9)) == 2
    for end in (Line(1, 0, "freed", at=2), Line(1, 0, "held", at=2, until=-1)):
        assert in_flight(held, end, Line(2, 0, "held", at=3, until=9)) == 1
    begun = Line(1, 0, "begin", at=2)
    assert in_flight(held, begun, Line(2, 0, "held", at=4, until=9)) == 2
