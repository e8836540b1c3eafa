"""``python -m tests.chaos``: the whole ordeal, or its cut, with what it came to at the end."""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import django

from sample_app import supervisor
from tests.servers import stoppable
from tests.shares import first

from . import routes, table
from .ordeal import Ordeal, Plan, Stage, undergo

FULL = Plan(rows=20_000, work=0.015, chaos=80, pause=1.2, calm=50)
#: One key has most of the rows, and they are handled one after another.
KEYS = replace(FULL, work=0.005, calm=600)
CUT = Plan(rows=250, low=150, work=0.04, chaos=5, pause=0.4, calm=90)

#: Faults that are printed in full.
MOST_TOLD = 10


def main() -> int:
    options = _options()
    seed = first("chaos", 2**32) if options.seed is None else options.seed
    every = table.CUT if options.cut else table.MODELS[options.model]
    names = options.only or list(every)
    given = {} if options.rows is None else {"rows": options.rows}
    # In the cut all processors undergo the same chaos; else each one has the workers for itself.
    rounds = [names] if options.cut else [[name] for name in names]
    plans = [
        replace(CUT if options.cut else KEYS if table.PROCESSORS[name].most else FULL, **given)
        for name, *_ in rounds
    ]
    print(f"Chaos with seed {seed}", flush=True)
    ordeals = _undergo([*zip(rounds, plans, strict=True)], seed)
    result = _result(seed, ordeals)
    for what in ("blows", "workers_killed", "sessions_ended", "deliveries"):
        print(f"{what}: {json.dumps(result[what], indent=2)}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2))
    faults = [fault for ordeal in ordeals for fault in ordeal.faults]
    for fault in faults[:MOST_TOLD]:
        print(fault)
    print(f"{len(faults)} faults; again with the same blows: make chaos SEED={seed}")
    return 1 if faults else 0


def _undergo(rounds: list[tuple[list[str], Plan]], seed: int) -> list[Ordeal]:
    # Without it, an immediate stop would be no blow at all.
    os.environ[supervisor.FSYNC] = "on"
    with (
        stoppable.started() as postgresql,
        tempfile.TemporaryDirectory(prefix="chaos") as folder,
        routes.laid(postgresql) as laid,
    ):
        _set_up(postgresql)
        table.make(postgresql)
        stage = Stage(postgresql, laid, Path(folder), _teller())
        dice = random.Random(seed)  # noqa: S311  # no secret
        return [undergo(stage, names, plan, dice) for names, plan in rounds]


def _set_up(postgresql: stoppable.Server) -> None:
    """Have Django in this process, too: for the person and the audit, whom no blow hits."""
    options = {**postgresql.database["OPTIONS"], "application_name": "monkey"}
    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.chaos.settings"
    os.environ["CHAOS_DATABASE"] = json.dumps({**postgresql.database, "OPTIONS": options})
    os.environ["CHAOS_ROUTE"] = routes.DIRECT
    django.setup()


def _teller() -> Callable[[str], None]:
    began = time.monotonic()
    return lambda what: print(f"{time.monotonic() - began:6.1f} s  {what}", flush=True)


def _result(seed: int, ordeals: list[Ordeal]) -> dict[str, Any]:
    blows = Counter(blow.kind for ordeal in ordeals for blow in ordeal.blows)
    return {
        "seed": seed,
        "blows": dict(sorted(blows.items())),
        "cut_short": [what for ordeal in ordeals for what in ordeal.cut_short],
        "workers_killed": sum(
            len(blow.pids) for each in ordeals for blow in each.blows if blow.kind == "kill_worker"
        ),
        "sessions_ended": sum(len(blow.backends) for each in ordeals for blow in each.blows),
        "deliveries": {
            name: what for ordeal in ordeals for name, what in ordeal.deliveries.items()
        },
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, help="Deal other blows; default: by the commit.")
    parser.add_argument(
        "--cut", action="store_true", help="The short one: most processors, at once."
    )
    parser.add_argument("--model", choices=table.MODELS, default="one-table")
    parser.add_argument("--only", nargs="+", choices=table.PROCESSORS, help="These alone.")
    parser.add_argument("--rows", type=int, help="Rows of each delivery.")
    parser.add_argument("--json", type=Path, help="Write the result to this file, too.")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
