"""``make test``, the gate, and ``make long``: they run the stages of ``tests/stages.toml``.

All that is downloaded comes first. Stages run a few side by side; what each prints goes to a file
of ``build/gate/``. A test that failed because a wait ran out (``tests/waiting.py``) is repeated at
the end, alone, three times, and has to pass each time; every other failure is final.

``python -m tests.suite STAGE [TEST…]`` runs one stage, or some of its tests, and prints all.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import psutil

from tests import failures, long_runs, machine
from tests.environments import CHECKOUT, ENVIRONMENTS
from tests.failures import Failure
from tests.prepare import PrepareFailedError, own_django, prepare
from tests.progress import Progress, Report

FOLDER = CHECKOUT / "build" / "gate"
#: Twice as many as there are processors: tests of processes wait a good part of their time.
LANES = 2 * (os.cpu_count() or 1)
#: So many times its budget, and half an hour at least, and a stage hangs. A test that hangs ends
#: earlier, by the time limit of pytest.
LIMIT, LEAST_LIMIT = 3, 1800.0
#: Waits that ran out are looked at again so often, if they are at most so many.
REPEATS, MOST_LATE = 3, 5
PATIENCE, MOST_PATIENCE = 120.0, 300.0  # seconds
DATABASES = {
    "postgresql": "postgresql",
    "debian": "postgresql",
    "mariadb": "mysql",
    "sqlite": "sqlite",
}
#: The modules that run a server.
SERVERS = {"debian": "tests.servers.postgresql", "mariadb": "tests.servers.mariadb"}


@dataclass(frozen=True)
class Stage:
    """One table of ``tests/stages.toml``, which says what each field means."""

    name: str
    about: str
    budget: float
    runs: str = "both"
    tests: tuple[str, ...] = ()
    but: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    database: str = "postgresql"
    django: str = ""
    environment: str = ""
    plugins: tuple[str, ...] = ()
    share: int = 1
    whole: tuple[str, ...] = ()
    count: int | None = None
    alone: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)

    def argvs(self, kind: str, only: Sequence[str] = ()) -> Iterator[list[str]]:
        """Yield the commands; ``only``: some of its tests, as pytest names them."""
        python = self._python()
        for command in [] if only else self.commands:
            yield [python, "-m", *command.split()]
        if self.tests:
            options = [f"--expect-database={DATABASES[self.database]}"]
            options += [f"--expect-django={self.django}"] if self.django else []
            if not only:
                options += [f"-p{each}" for each in self.plugins]
                left_out = {True: "--deselect", False: "--ignore"}
                options += [f"{left_out['::' in each]}={each}" for each in self.but]
                options += [f"--share={self.share}", *(f"--whole={each}" for each in self.whole)]
                if kind == "gate" and self.count is not None and os.environ.get("CI") == "true":
                    options.append(f"--expect-tests={self.count}")
            server = SERVERS.get(self.database)
            within = [server, "--", python, "-m"] if server else []
            yield [python, "-m", *within, "pytest", *(only or self.files()), *options]

    def files(self) -> list[str]:
        """Return what pytest is to collect, with the patterns replaced by the files."""
        found = [sorted(CHECKOUT.glob(each)) if "*" in each else [each] for each in self.tests]
        names = [str(path).removeprefix(f"{CHECKOUT}/") for paths in found for path in paths]
        return [name for name in names if name not in self.but]

    def _python(self) -> str:
        for each in ENVIRONMENTS:
            if each.django == self.django:
                return each.own_python
        if self.environment:
            return str(CHECKOUT / self.environment / "bin" / "python")
        return sys.executable


def stages(kind: str) -> list[Stage]:
    """Return those of the gate or of the long suite; ``""``: all."""
    tables = tomllib.loads((CHECKOUT / "tests" / "stages.toml").read_text())
    listed = [Stage(name, **_frozen(table)) for name, table in tables.items()]
    return [each for each in listed if not kind or each.runs in {"both", kind}]


def _frozen(table: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(it) if isinstance(it, list) else it for key, it in table.items()}


@dataclass
class Run:
    """One run of a kind, with the machine's factor: what its stages get as environment."""

    kind: str
    factor: float = 1.0
    shown: bool = False

    def limit(self, stage: Stage) -> float:
        """Return the seconds after which the stage hangs."""
        scale = 1 if self.kind == "gate" else 8
        return max(LEAST_LIMIT, LIMIT * stage.budget * max(1.0, self.factor) * scale)

    def environment(self, stage: Stage, name: str) -> dict[str, str]:
        patience = round(min(MOST_PATIENCE, PATIENCE * max(1.0, self.factor)))
        variables = {
            "PATIENCE": os.environ.get("PATIENCE", str(patience)),
            "PYTHONUNBUFFERED": "1",
            **({"WHOLE": "1"} if self.kind == "long" else {}),
            # The settings name a temporary file for the test database; this one is never opened.
            **({"DATABASE_URL": "sqlite:////nonexistent/x"} if stage.database == "sqlite" else {}),
            **stage.variables,
        }
        if not self.shown:
            variables |= {
                "FAILURES": str(FOLDER / f"{name}.jsonl"),
                "STACKS": str(FOLDER / f"{name}.stacks"),
                "STAGE_LIMIT": str(self.limit(stage)),
            }
        return {**os.environ, **variables}

    def stage(
        self, stage: Stage, progress: Progress, only: Sequence[str] = (), again: str = ""
    ) -> list[Failure]:
        """Run a stage into its file, and return what failed."""
        name = f"{stage.name}{again}".replace(" ", "-")
        log, code = FOLDER / f"{name}.log", 0
        for suffix in (".log", ".jsonl", ".stacks"):
            (FOLDER / f"{name}{suffix}").unlink(missing_ok=True)
        if not again:
            progress.started(stage.name)
        for argv in stage.argvs(self.kind, only):
            with (
                log.open("a") as file,
                subprocess.Popen(
                    argv,
                    cwd=CHECKOUT,
                    env=self.environment(stage, name),
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                ) as process,
                _ended_after(self.limit(stage) + 60, process.pid),
            ):
                code = process.wait() or code
        found = failures.read(FOLDER / f"{name}.jsonl")
        lines = log.read_text(errors="replace").splitlines()
        if why := self._broke(stage, name, code, found):
            found.append(Failure("the stage", why, log=tuple(lines[-20:])))
        if not again:
            said = next((line for line in reversed(lines) if " passed" in line), "")
            progress.ended(stage.name, said.strip("= "), stage.budget, found)
            if self.kind == "long" and not found:
                long_runs.write_down(stage.name)
        return found

    def all(self, listed: Sequence[Stage], progress: Progress, report: Report) -> None:
        """Run the stages, then those that need the machine for themselves, then what was late."""
        beside = [each for each in listed if not each.alone]
        with ThreadPoolExecutor(LANES) as pool:
            found = pool.map(lambda each: self.stage(each, progress), beside)
            for stage, its in zip(beside, found, strict=True):
                report.add(stage.name, its)
        for stage in listed:
            if stage.alone:
                report.add(stage.name, self.stage(stage, progress))
        known = {each.name: each for each in listed}
        if len(report.failed) > MOST_LATE or not all(each.late for _, each in report.failed):
            return  # red in any case: something deadlocks, or the machine stood still
        for name, failure in [*report.failed]:
            again: list[Failure] = []
            for number in range(1, REPEATS + 1):
                again += self.stage(known[name], progress, [failure.test], f"-again-{number}")
            report.repeated(name, failure, again)

    def _broke(self, stage: Stage, name: str, code: int, found: Sequence[Failure]) -> str:
        """Return how a stage ended that no failed test explains."""
        stacks = FOLDER / f"{name}.stacks"
        if stacks.exists() and stacks.stat().st_size:
            return f"expected the end within {self.limit(stage):.0f} s, got none; see {stacks}"
        if code not in {0, 1} or (code and not found):
            return f"expected exit code 0, got {code}"
        return ""


@contextmanager
def _ended_after(seconds: float, pid: int) -> Iterator[None]:
    """End a process and its children if they are still there after so long."""

    def end() -> None:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            for each in [*process.children(recursive=True), process]:
                with suppress(psutil.NoSuchProcess):
                    each.kill()

    timer = threading.Timer(seconds, end)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def everything(kind: str) -> int:
    """Run all stages of the kind; return 1 if something failed, 3 if nothing could be tested."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    listed = [each for each in stages(kind) if each.django != own_django()]
    if kind == "long":
        listed = [each for each in listed if not long_runs.is_green(each.name)]
    progress = Progress(began, [each.name for each in listed])
    try:
        run = Run(kind, machine.wait_until_quiet())
        progress.line("prepare", f"started, {run.factor:.1f} times as slow as on an idle machine")
        missing = prepare(
            FOLDER / "prepare.log",
            {each.django for each in listed},
            {each.database for each in listed},
        )
    except machine.TooSlowError as error:
        print(error)
        return 3
    except PrepareFailedError as error:
        print(f"PREPARE FAILED (network): {error}")
        return 3
    progress.line("prepare", f"took {time.monotonic() - began:.0f} s")
    report = Report(run.factor)
    for each in listed:
        if reason := missing.get(each.django) or missing.get(each.database):
            report.left_out[each.name] = reason
    run.all([each for each in listed if each.name not in report.left_out], progress, report)
    print(long_runs.age([each.name for each in stages("long")]))
    report.print(FOLDER)
    return int(report.is_red())


def some(name: str, tests: Sequence[str]) -> int:
    """Run one stage, or some of its tests, with all that it prints."""
    known = {each.name: each for each in stages("")}
    if name not in known:
        print(f"Expected a stage out of {', '.join(known)}; got {name}.")
        return 2
    kind = os.environ.get("RUN", "long" if known[name].runs == "long" else "gate")
    run, stage = Run(kind, shown=True), known[name]
    codes = [
        subprocess.call(argv, cwd=CHECKOUT, env=run.environment(stage, name))
        for argv in stage.argvs(kind, tests)
    ]
    return int(any(codes))


def main(arguments: Sequence[str]) -> int:
    """Run what is named, and return the exit code."""
    if arguments in ([], ["gate"], ["long"]):
        return everything(arguments[0] if arguments else "gate")
    return some(arguments[0], arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
