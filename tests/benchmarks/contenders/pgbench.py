"""PostgreSQL's own load generator with the same one-statement claim: no Python, and no handler.

It keeps no log. Each of its transactions names the next key, and there are as many as rows: when
none is pending in the end, each claimed one. It is the speed that the server has to give.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from django.db import connection

from sample_app import embedded
from tests.benchmarks.contenders import Drained
from tests.benchmarks.contenders.raw import CLAIM
from tests.benchmarks.rows import fill as prepare
from tests.benchmarks.rows import left

__all__ = ["drain", "left", "prepare"]

NEXT_KEY = r"""
\if :key = 0
\set key :client_id + 1 - :workers
\endif
\set key :key + :workers
"""
DURATION = re.compile(r"tps = ([0-9.]+) \(without initial connection time\)")


def drain(workers: int) -> Drained:
    """Claim all rows, each client every so-manieth key."""
    rows = left()
    if rows % workers:
        raise ValueError(f"expected rows that {workers} workers can share evenly, got {rows}.")
    with tempfile.NamedTemporaryFile("w", suffix=".sql") as script:
        script.write(NEXT_KEY)
        script.write(" ".join(CLAIM.format(these="= :key").split()) + ";\n")
        script.flush()
        told = ("--file", script.name, "-D", "key=0", "-D", f"workers={workers}")
        said = _pgbench(*told, "-c", str(workers), "-j", "1", "-t", str(rows // workers))
    if f"actually processed: {rows}/{rows}" not in said:
        raise RuntimeError(said)
    (per_second,) = DURATION.findall(said)
    return Drained(rows, seconds=rows / float(per_second))


def find() -> str:
    """Return the wheel's pgbench, or the one on the path."""
    wheel = embedded._wheel() / "bin" / "pgbench"
    found = str(wheel) if wheel.exists() else shutil.which("pgbench")
    if found is None:
        raise FileNotFoundError("expected pgbench in the wheel or on PATH, got none.")
    return found


def _pgbench(*arguments: str) -> str:
    given = connection.settings_dict
    where = ("-h", str(given["HOST"]), "-U", str(given["USER"]), *(_port(given["PORT"])))
    command = [find(), "--no-vacuum", "--protocol=prepared", *where, *arguments]
    done = subprocess.run(
        [*command, str(given["NAME"])], capture_output=True, text=True, check=True, cwd=Path("/")
    )
    return done.stdout


def _port(port: object) -> tuple[str, ...]:
    return ("-p", str(port)) if port else ()
