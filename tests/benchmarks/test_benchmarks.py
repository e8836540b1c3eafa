"""The benchmarks at a small size: each contender drains and is audited, and the audit can fail.

What needs an environment of its own is left out; it runs with ``make bench``.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from django.db import connection

from tests.benchmarks import handling, wire
from tests.benchmarks.audit import AuditError, audit
from tests.benchmarks.contenders import (
    CONCURRENT,
    CONTENDERS,
    WATCHED,
    WITH_FAILURES,
    ours,
    raw,
    raw_claim,
)
from tests.benchmarks.handling import Call
from tests.benchmarks.measuring import COMMITS, DELAY, MESSAGES
from tests.benchmarks.network import NETWORKS, SOCKET
from tests.benchmarks.scenarios import FORGETFUL
from tests.models import Errand

TABLE = "tests_errand."

#: What only the scenario of networks has, or none.
ELSEWHERE = {CONCURRENT, "raw claim at the head, batch 1", *FORGETFUL}

#: Messages and commits: two reads of keys, of which the second finds none; and each row's.
SENT_FOR_TEN_ROWS = {
    "raw statements, batch 1": (2 + 40, 2 + 10),
    "raw one message, batch 1": (2 + 10 + 1, 2 + 10),
    "raw claim, batch 1": (2 + 10, 2 + 10),
}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    from tests import settings

    # Not the embedded server with fsync, which would have to be made first.
    environment = {**os.environ, "DATABASE_URL": settings.url}
    command = [sys.executable, "-m", "tests.benchmarks", "--rounds", "1", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_everybody_drains_and_the_figures_are_written(tmp_path: Path) -> None:
    written = tmp_path / "results.json"
    scenarios = "one-by-one,batches,extras,watched,workers,statements,backlog,snapshot"
    done = run("--rows", "20", "--workers", "2", "--only", scenarios, "--json", str(written))

    assert done.returncode == 0, done.stdout + done.stderr
    assert "Audited: nothing handled twice, lost or left." in done.stdout
    assert "| fsync | " in done.stdout
    results = json.loads(written.read_text())["results"]
    assert all(result["figures"]["rate"] > 0 for result in results)
    assert {result["name"].partition(", out of")[0] for result in results} >= {
        name for name, each in CONTENDERS.items() if not each.needs and name not in ELSEWHERE
    }
    assert sum(result["scenario"] == "backlog" for result in results) == 4
    assert sum(result["scenario"] == "snapshot" for result in results) == 4
    counts = {
        r["name"]: r["figures"]["statements per row"]
        for r in results
        if r["scenario"] == "statements"
    }
    assert 2 <= counts["transactional, batch 1"] < counts["spanning, batch 1"]


def test_everybody_drains_through_each_network(tmp_path: Path) -> None:
    written = tmp_path / "results.json"
    done = run("--rows", "10", "--only", "network", "--json", str(written))

    assert done.returncode == 0, done.stdout + done.stderr
    assert "measured delay, ms: median" in done.stdout
    results = json.loads(written.read_text())["results"]
    turns = Counter((r["name"], r["network"]) for r in results)
    here = {name for name, each in CONTENDERS.items() if each.is_installed()}
    here -= {*FORGETFUL, WATCHED, WITH_FAILURES}
    assert turns == dict.fromkeys(itertools.product(here, NETWORKS), 1)
    for result in results:
        name, rows, figures = result["name"], result["rows"], result["figures"]
        assert (DELAY in figures) == (result["network"] != SOCKET)
        if result["network"] == SOCKET:
            continue
        messages, commits = figures[MESSAGES] * rows, figures[COMMITS] * rows
        assert messages >= commits > 0
        if name in SENT_FOR_TEN_ROWS:
            assert (messages, commits) == pytest.approx(SENT_FOR_TEN_ROWS[name])


def test_a_row_that_is_lost_fails_the_run() -> None:
    done = run("--rows", "10", "--only", "forgetful")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 never handled (such as 1)" in done.stdout


def calls(*pks: int) -> list[Call]:
    return [Call(pk, 0, 0) for pk in pks]


@pytest.mark.parametrize(
    ("pks", "left", "finding"),
    [
        ((1, 2, 2), 0, "1 handled more than once (such as 2)"),
        ((1,), 0, "1 never handled (such as 2)"),
        ((1, 2, 3), 0, "1 handled and not asked for (such as 3)"),
        ((1, 2), 4, "4 rows still pending"),
    ],
)
def test_the_audit_names_what_is_wrong(pks: tuple[int, ...], left: int, finding: str) -> None:
    with pytest.raises(AuditError, match=re.escape(finding)):
        audit("a contender", {1, 2}, calls(*pks), left)


def sent_by_us(tmp_path: Path, delivery: str, batch_size: int = 1) -> set[str]:
    """Return the statements of a run, less what differs from the bare driver's way of writing."""
    Errand.objects.bulk_create([Errand() for _ in range(6)])
    close = handling.open_log(tmp_path / "log", 0, 0)
    with wire.listening(tmp_path / "trace"):
        assert ours.drain(1, delivery=delivery, batch_size=batch_size).handled == 6
    close()
    return {_plain(statement) for statement in wire.read(tmp_path / "trace").statements}


def _plain(statement: str) -> str:
    plain = " ".join(statement.replace('"', "").replace("dcl_", "").split())
    plain = re.sub(r"(?<!_)\b\d+\b|%s|\$\d+", "?", plain)
    plain = plain.replace("'?'", "?")
    plain = re.sub(r"ANY\('\{[?,]+\}'(::int\d\[\])?\)", "ANY(?)", plain)
    for name in ("pk", "done", "before_0"):
        plain = plain.replace(f" AS {name}", "")
    for addition, without in (("= (?)", "= ?"), (TABLE, "")):
        plain = plain.replace(addition, without)
    # A flip that waits for the next claim counts what it writes.
    plain = re.sub(r"^WITH flipped AS \((UPDATE .*) RETURNING \?\) SELECT .*$", r"\1", plain)
    plain = re.sub(r"\(NOT done AND id (= \?|= ANY\(\?\))\)", r"NOT done AND id \1", plain)
    return plain.replace("( ", "(").replace(" )", ")")


@pytest.mark.django_db(transaction=True)
@pytest.mark.skipif(connection.vendor != "postgresql", reason="libpq traces PostgreSQL")
@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_bare_driver_is_given_the_statements_that_we_send(
    tmp_path: Path, batch_size: int
) -> None:
    sent = sent_by_us(tmp_path, "transactional", batch_size)
    keys = list(range(batch_size))
    for statement in (raw.LOCK, raw.FLIP):
        assert _plain(raw.with_keys(statement, keys).decode()) in sent


@pytest.mark.django_db(transaction=True)
@pytest.mark.skipif(connection.vendor != "postgresql", reason="libpq traces PostgreSQL")
def test_the_bare_driver_is_given_the_claim_that_we_send(tmp_path: Path) -> None:
    sent = sent_by_us(tmp_path, "at_most_once")
    assert _plain(raw.with_keys(raw_claim.CLAIM, [1]).decode()) in sent
