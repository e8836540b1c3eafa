"""``python -m tests.keys``: each delivery and mode over skewed and even keys, and without keys."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks import scratch

from .crew import SKEWS, Crew, Round, crew_of
from .play import Result, play

MODES = ("plain", "by_key", "in_order", "two_at_once")
DELIVERIES = ("transactional", "at_most_once", "at_least_once")


def main() -> int:
    options = _options()
    rounds = [
        Round(delivery, skew, mode)
        for delivery in options.only
        for skew in options.skews
        for mode in options.modes
    ]
    with scratch.database(fsync=False):
        import django

        django.setup()
        from . import table

        table.make()
        with crew_of(options.workers) as crew:
            results = [_told(crew, each, options) for each in rounds]
        from django.db import connections

        connections.close_all()
    print(_table(rounds, results))
    faults = [fault for result in results for fault in result.faults]
    if options.json:
        said = [{**vars(a), **vars(b)} for a, b in zip(rounds, results, strict=True)]
        options.json.write_text(json.dumps(said, indent=2))
    print(f"{len(faults)} faults")
    return 1 if faults else 0


def _told(crew: Crew, of: Round, options: argparse.Namespace) -> Result:
    result = play(crew, of, options.rows, options.work)
    made = ", ".join(f"{kind} {number}" for kind, number in result.troubles.items())
    print(f"{of.delivery}, {of.skew}, {of.mode}: {result.seconds:.1f} s; {made}", flush=True)
    for fault in result.faults[:10]:
        print(f"  {fault}")
    return result


def _table(rounds: Sequence[Round], results: Sequence[Result]) -> str:
    plain = {
        (each.delivery, each.skew): result.speed
        for each, result in zip(rounds, results, strict=True)
        if each.mode == "plain"
    }
    lines = [f"{'':46}{'rows':>7}{'rows/s':>8}{'of plain':>10}{'in flight':>11}{'faults':>8}"]
    for each, result in zip(rounds, results, strict=True):
        before = plain.get((each.delivery, each.skew))
        part = f"{result.speed / before:.2f}" if before else "-"
        name = f"{each.delivery}, {each.skew}, {each.mode}"
        lines.append(
            f"{name:46}{result.rows:7}{result.speed:8.0f}{part:>10}{result.most:11}"
            f"{len(result.faults):8}"
        )
    return "\n".join(["", *lines, ""])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.keys", description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000, help="Rows of each round.")
    parser.add_argument("--workers", type=int, default=8, help="Workers.")
    parser.add_argument("--work", type=float, default=0.001, help="Seconds that a handler takes.")
    parser.add_argument("--only", nargs="+", choices=DELIVERIES, default=list(DELIVERIES))
    parser.add_argument("--skews", nargs="+", choices=SKEWS, default=list(SKEWS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--json", type=Path, help="Write the result to this file, too.")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
