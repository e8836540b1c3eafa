"""The cut of the ordeal, and the same with workers that are wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.servers import pgbouncer

from .crew import CHECKOUT
from .table import CUT

pytestmark = [
    pytest.mark.timeout(960),
    pytest.mark.skipif(not pgbouncer.is_installed(), reason="Debian's pgbouncer is not installed"),
]


def chaos(tmp_path: Path, *options: str) -> tuple[int, str, dict[str, Any]]:
    path = tmp_path / "result.json"
    ended = subprocess.run(
        [sys.executable, "-m", "tests.chaos", "--cut", "--json", str(path), *options],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,  # on a busy machine each part of it takes as long as it may
    )
    said = ended.stdout + ended.stderr
    assert path.exists(), said
    return ended.returncode, said, json.loads(path.read_text())


def test_every_delivery_keeps_its_promise_through_every_kind_of_blow(tmp_path: Path) -> None:
    code, said, result = chaos(tmp_path)
    assert code == 0, said
    assert len(result["blows"]) == 10, said
    assert result["workers_killed"] > 0, said
    assert set(result["deliveries"]) == set(CUT)
    for counts in result["deliveries"].values():
        assert counts["done"] + counts["in_doubt"] == counts["rows"], said
        # On a slow machine, rows that no worker has begun are withdrawn at the end.
        assert counts["rows"] + counts["withdrawn"] >= 250, said


@pytest.mark.timeout(1_800)
def test_workers_that_are_wrong_are_found(tmp_path: Path) -> None:
    deliveries = ("transactional", "at_most_once")
    # Kills are enough to find what is wrong, and soon over.
    kills = ("--blows", "kill_worker", "--calm", "5")
    found: set[str] = set()
    # On a busy machine all kills of one delivery may come while its workers start.
    for seed in range(10):
        again = ("--only", *deliveries, "--broken", "--seed", str(seed), *kills)
        code, said, result = chaos(tmp_path, *again)
        counts = result["deliveries"]
        assert code == any(counts[name]["faults"] for name in deliveries), said
        # Killed between the flip and the work: the row is done, and the work is not.
        if counts["transactional"]["faults"]:
            assert "was worked on 0 times in the database" in said
            found.add("transactional")
        # Killed between the work and its commit.
        if counts["at_most_once"]["faults"]:
            assert counts["at_most_once"]["called_2+"] > 0, said
            found.add("at_most_once")
        if found == {*deliveries}:
            break
    assert found == {*deliveries}, said
