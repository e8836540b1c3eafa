"""Put each fault into a copy of the tree, and run the tests that are to find it.

python -m tests.mutants [--sample 10] [--seed text] [--only scan.py] [--jobs 2]

A mutant is killed by a test that fails; tests that cannot be collected, or do not pass without the
fault, kill nothing. The tree itself is never written to.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from queue import SimpleQueue

from tests.mutants.listed import CHECKOUT, Mutant, mutants
from tests.servers.mariadb import mariadb
from tests.shares import selected_by
from tests.waiting import PATIENCE

PASSED, FAILED, HUNG = 0, 1, -1  # of pytest's other exit codes none is an answer
LEFT_BEHIND = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "_build")

Place = tuple[Path, dict[str, str]]


@contextmanager
def workers(number: int, kinds: set[str]) -> Iterator[SimpleQueue[Place]]:
    """Make copies of the tree, and start one server of each kind for all of them."""
    with ExitStack() as stack:
        urls = {"sqlite": "sqlite:////nonexistent/dcl.sqlite3"}
        if "postgresql" in kinds:
            from sample_app.embedded import database_url

            urls["postgresql"] = database_url("postgres")
        if "mariadb" in kinds:
            urls["mariadb"] = stack.enter_context(mariadb())
        places: SimpleQueue[Place] = SimpleQueue()
        for _ in range(number):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dcl_mutants_")))
            shutil.copytree(CHECKOUT, folder, ignore=LEFT_BEHIND, dirs_exist_ok=True)
            places.put((folder, urls))
        yield places


def ends(tests: str, on: str, place: Place, *, patience: float) -> tuple[int, str]:
    """Run the tests in the copy; return pytest's exit code, and what it said."""
    folder, urls = place
    # Plugins that no test of a mutant needs take longer to import than most of these tests.
    plugins = ["-p", "pytest_django.plugin", "-p", "pytest_timeout"]
    command = [sys.executable, "-m", "pytest", "-xqp", "no:cacheprovider", *plugins]
    # A file that is put back within a second would pass for the one that was compiled.
    quiet = {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "CI": "false"}
    # The point of a search that finds the fault is in one share.
    quiet["WHOLE"] = quiet["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    # A test whose wait runs out because of the fault ends, and fails, in time.
    quiet["PATIENCE"] = str(patience / 4)
    quiet["FAILURES"] = os.devnull  # its failure is none of the stage's
    with subprocess.Popen(
        [*command, *shlex.split(tests)],
        cwd=folder,
        env={**os.environ, **quiet, "DATABASE_URL": urls[on]},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            said, _ = process.communicate(timeout=patience)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return HUNG, process.communicate()[0]
    return process.returncode, said


def judged(mutant: Mutant, places: SimpleQueue[Place], patience: float) -> str:
    """Return what is wrong with the mutant: nothing, if it was killed."""
    place, began = places.get(), time.monotonic()
    try:
        code, said = ends(mutant.tests, mutant.on, place, patience=4 * PATIENCE)
        if code != PASSED:
            complaint = f"its tests do not pass without it (exit code {code})"
        else:
            before = mutant.applied(place[0])
            code, said = ends(mutant.tests, mutant.on, place, patience=patience)
            (place[0] / mutant.path).write_text(before)
            failed = code == FAILED and re.search("^(FAILED|ERROR) tests/", said, re.MULTILINE)
            killed = failed or (code == HUNG and mutant.hangs)
            words = {PASSED: "survived", HUNG: "hung"}
            complaint = "" if killed else words.get(code, f"broke the tests (exit code {code})")
    finally:
        places.put(place)
    print(f"{complaint or 'killed'} ({time.monotonic() - began:.1f} s)  {mutant}", flush=True)
    if complaint and code != PASSED:
        print(said[-3000:], flush=True)
    return complaint


def main(arguments: Sequence[str]) -> int:
    """Return 1 unless each mutant that was tried was killed, and none of the list is stale."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("--sample", type=int)
    parser.add_argument("--seed", default=selected_by())
    parser.add_argument("--only", default="")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--patience", type=float, default=PATIENCE)
    options = parser.parse_args(arguments)
    listed = list(mutants())
    stale = [f"stale mutant, {wrong}: {each}" for each in listed if (wrong := each.stale())]
    print(*stale, sep="\n")
    tried = [each for each in listed if not each.stale() and options.only in str(each)]
    if options.sample:
        print(f"{options.sample} of {len(tried)} mutants, --seed {options.seed}", flush=True)
        dice = random.Random(options.seed)  # noqa: S311  # no secret
        tried = dice.sample(tried, min(options.sample, len(tried)))
    kinds = {each.on for each in tried}
    with workers(options.jobs, kinds) as places, ThreadPoolExecutor(options.jobs) as pool:
        judge = partial(judged, places=places, patience=options.patience)
        complaints = list(pool.map(judge, tried))
    alive = [(each, why) for each, why in zip(tried, complaints, strict=True) if why]
    print(f"\n{len(tried)} mutants, {len(tried) - len(alive)} killed, {len(stale)} stale")
    for mutant, why in alive:
        print(f"{why}: {mutant}\n    pytest {mutant.tests}  [{mutant.on}]")
    return 1 if alive or stale or not tried else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
