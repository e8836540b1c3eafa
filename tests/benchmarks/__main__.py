"""``python -m tests.benchmarks [--rows UNIT] [--rounds N] [--only SCENARIO,…] [--json FILE]``.

Exit code 1 when the audit found a row that was handled twice, lost or left, or when a contender
did not come to an end.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import django

from tests.benchmarks import scratch
from tests.benchmarks.measuring import Measurement


def main(arguments: Sequence[str]) -> int:
    options = _parse(arguments)
    with scratch.database(fsync=options.fsync == "on"):
        django.setup()
        return _run(options)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("tests.benchmarks", description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000, help="the unit of all sizes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="scenarios, with commas between")
    parser.add_argument("--workers", default="1,4,16,48", help="how many workers race")
    parser.add_argument("--fsync", choices=("on", "off"), default="on", help="embedded server only")
    parser.add_argument("--json", type=Path, help="write every measurement there")
    parser.add_argument("--docs", type=Path, help="write tables into that folder")
    return parser.parse_args(arguments)


def _run(options: argparse.Namespace) -> int:
    # Imported late: they need models, and models need settings.
    from tests.benchmarks import page, rows
    from tests.benchmarks.audit import AuditError
    from tests.benchmarks.measuring import Bench
    from tests.benchmarks.network import ProxyFailedError
    from tests.benchmarks.scenarios import SCENARIOS
    from tests.benchmarks.team import WorkerFailedError, team

    chosen = options.only.split(",") if options.only else list(SCENARIOS)
    if unknown := [name for name in chosen if name not in SCENARIOS]:
        print(f"Expected scenarios out of {', '.join(SCENARIOS)}; got {', '.join(unknown)}.")
        return 2
    server = scratch.describe()
    rows.make_tables()
    began = time.monotonic()
    with team() as members:
        bench = Bench(
            members,
            options.rows,
            options.rounds,
            [int(number) for number in options.workers.split(",")],
            lambda line: print(line, file=sys.stderr),
        )
        try:
            for name in chosen:
                SCENARIOS[name](bench)
                _write(options.json, server, bench.results)
        except (AuditError, WorkerFailedError, ProxyFailedError) as error:
            print(f"Failed: {error}")
            return 1
    for name, table in page.tables(bench.results, server).items():
        print(f"{name}:", *table, "", sep="\n")
    if bench.left_out:
        print(f"Left out, because not installed: {', '.join(sorted(bench.left_out))}.")
    print(f"Audited: nothing handled twice, lost or left. {time.monotonic() - began:.0f} s")
    if options.docs:
        page.write(bench.results, server, options.docs)
    return 0


def _write(path: Path | None, server: Mapping[str, str], results: Sequence[Measurement]) -> None:
    """Write what there is after each scenario: the next one may be interrupted."""
    if path is not None:
        written = {"server": server, "results": [asdict(result) for result in results]}
        path.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
