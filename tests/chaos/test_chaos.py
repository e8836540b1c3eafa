"""The cut of the ordeal, and what its judgement finds in records that are wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers import pgbouncer

from .audit import Call
from .crew import CHECKOUT
from .judgement import Records, Row, Terms, judge
from .table import CUT

pytestmark = [
    pytest.mark.timeout(960),
    pytest.mark.skipif(not pgbouncer.is_installed(), reason="Debian's pgbouncer is not installed"),
]


def test_every_delivery_keeps_its_promise_through_every_kind_of_blow(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    ended = subprocess.run(
        [sys.executable, "-m", "tests.chaos", "--cut", "--json", str(path)],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,  # on a busy machine each part of it takes as long as it may
    )
    said = ended.stdout + ended.stderr
    assert ended.returncode == 0, said
    result = json.loads(path.read_text())
    assert len(result["blows"]) == 10, said
    assert result["workers_killed"] > 0, said
    assert set(result["deliveries"]) == set(CUT)
    for counts in result["deliveries"].values():
        assert counts["done"] + counts["in_doubt"] == counts["rows"], said
        # On a slow machine, rows that no worker has begun are withdrawn at the end.
        assert counts["rows"] + counts["withdrawn"] >= 250, said


def test_records_that_are_wrong_are_found() -> None:
    calls = [Call(0, 1, pid, "direct", began, began + 1) for pid, began in ((11, 1.0), (12, 3.0))]
    rows = [Row(1, done=True), Row(2, done=True)]
    records = Records(rows, calls, worked={1: 2}, settled={1: 1}, in_doubt=(), blows=())
    for delivery, faults in {
        "transactional": ("worked on 2 times", "for no reason", "is lost", "settled 0 times"),
        "at_most_once": ("was handled 2 times", "is lost", "settled 0 times"),
        "at_least_once": ("is lost", "settled 0 times"),
    }.items():
        found = "\n".join(judge(Terms(delivery), records).faults)
        assert all(fault in found for fault in faults), found
