"""Everything that ``make test`` runs, stage by stage.

A stage for which this machine lacks something is left out, with one line that says what; with
CI=true that is a failure. ``python -m tests.suite STAGE…`` runs only the stages named, one after
the other. Without a name all are run, a few side by side: each tells
how far it is, and what one that failed has printed comes last.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import version

from tests.environments import ENVIRONMENTS, Environment, EnvironmentBrokenError
from tests.progress import side_by_side, verdict
from tests.servers.mariadb import is_installed as mariadb_is_installed
from tests.servers.pgbouncer import is_installed as pgbouncer_is_installed
from tests.servers.redis import is_installed as redis_is_installed

Stage = tuple[str, Callable[[], None]]

CONTRACT = ("tests/contract", "tests/crash", "tests/fuzz")
#: Tests that start processes and servers.
PROGRAMS = (
    "tests/benchmarks",
    "tests/chaos",
    "tests/cluster",
    "tests/crash",
    "tests/docs",
    "tests/edge",
    "tests/production",
    "tests/race",
    "tests/sample_app",
    "tests/test_embedded.py",
    "tests/test_fourth_delivery.py",
    "tests/test_mutants.py",
    "tests/test_pools.py",
    "tests/test_strict.py",
    "tests/test_uncompiled.py",
    "tests/typing",
)
# Schedules, processes, servers and other packages are the same under each Django: once is enough.
# What Django makes of a question, and what becomes of it in a race, is in the contract.
ABOUT_THE_REST = (
    "tests/benchmarks",
    "tests/chaos",
    "tests/cluster",
    "tests/crash",
    "tests/docs",
    "tests/edge/test_in_flight.py",
    "tests/edge/test_idle.py",
    "tests/edge/test_spare.py",
    "tests/edge/test_supervisor.py",
    "tests/edge/test_listener.py",
    "tests/edge/test_operation.py",
    "tests/edge/test_error_dedup.py",
    "tests/edge/test_polling.py",
    "tests/edge/test_restarts.py",
    "tests/edge/test_watch.py",
    "tests/edge/test_workers.py",
    "tests/explorer",
    "tests/fuzz/test_broken.py",
    "tests/production",
    "tests/race",
    "tests/sample_app/test_demo.py",
    "tests/sample_app/test_payments.py",
    "tests/sample_app/test_warehouse.py",
    "tests/test_embedded.py",
    "tests/test_fourth_delivery.py",
    "tests/test_mutants.py",
    "tests/test_packaging.py",
    "tests/test_strict.py",
    "tests/test_suite.py",
    "tests/test_uncompiled.py",
)
#: What knows the driver: transactions, their ends and levels, and sessions that are lost.
ABOUT_THE_DRIVER = tuple(
    f"tests/contract/test_{name}.py"
    for name in (
        "at_least_once",
        "at_most_once",
        "operator_actions",
        "transaction_guard",
        "leases",
        "leftovers",
        "lost_transactions",
        "run",
    )
)
MARIADB_PACKAGES = ("mariadb-server", "libmariadb-dev", "pkg-config", "gcc", "python3-dev")


#: Stages that take longest, in this order.
FIRST = ("programs", "postgresql", "django6.1", "mariadb", "sqlite", "django6.0")
#: Stages that need the machine for themselves.
ALONE = ("speed",)
#: Tests that have to pass in a stage, at least: so few mean that some were not collected.
LEAST = {
    "postgresql": 3100,
    "programs": 1000,
    "mariadb": 2000,
    "sqlite": 1300,
    "psycopg2": 300,
    "django5.2": 2900,
    "django6.0": 2000,
    "django6.1": 2900,
    "speed": 1,
}


class LeftOutError(Exception):
    """This machine lacks something that the stage needs; the message says what."""


class StageFailedError(Exception):
    """A command of the stage failed, and has said why itself."""


def lint() -> None:
    """Check style, format and types."""
    # mypy's plugin reads the settings, and no server is needed for that.
    no_server = {"DATABASE_URL": "sqlite://:memory:"}
    outcomes = [
        call("ruff", "check", "."),
        call("ruff", "format", "--check", "."),
        call("mypy", **no_server),
        call("pyright", **no_server),
    ]
    if any(outcomes):
        raise StageFailedError


def docs() -> None:
    """Build the documentation, where a warning is an error."""
    run("sphinx", "-W", "--keep-going", "--quiet", "docs", "docs/_build/html")


def postgresql() -> None:
    """Run on PostgreSQL all that needs no process but its own."""
    run("pytest", *without(PROGRAMS), *expected("postgresql"))


def programs() -> None:
    """Run on PostgreSQL what starts processes and servers."""
    install_servers()
    run("pytest", *PROGRAMS, *expected("programs"))


def mariadb() -> None:
    """Run the contract suite on a private MariaDB."""
    if not (mariadb_is_installed() and has_driver()):
        install_mariadb()
    tests = (*CONTRACT, "tests/test_servers.py", *expected("mariadb", "mysql"))
    run("tests.servers.mariadb", "--", sys.executable, "-m", "pytest", *tests)


def sqlite() -> None:
    """Run the contract suite on SQLite."""
    # The settings name a temporary file for the test database; this one is never opened.
    url = "sqlite:////nonexistent/dcl.sqlite3"
    run("pytest", *CONTRACT, *expected("sqlite", "sqlite"), DATABASE_URL=url)


def psycopg2() -> None:
    """Run what knows the driver with the older one, which Django takes if it has to."""
    settings = {"DJANGO_SETTINGS_MODULE": "tests.settings_psycopg2"}
    run("pytest", *ABOUT_THE_DRIVER, *expected("psycopg2"), **settings)


def faults() -> None:
    """Put ten faults of the list into a copy of the tree, and see that a test finds each."""
    if not mariadb_is_installed() or not has_driver():
        install_mariadb()
    run("tests.mutants", "--sample=10", "--jobs=1")


def speed() -> None:
    """Compare speeds, which needs the machine for itself."""
    run("pytest", "tests/speed", *expected("speed"))


def other_django(environment: Environment) -> None:
    """Run the suite under another Python and Django."""
    python = environment.find_python()
    if python is None:
        raise LeftOutError(
            f"Python {environment.python} with its venv module was not found "
            f"(name it with {environment.variable}=…)"
        )
    arguments = [*environment.pytest_arguments, *without(ABOUT_THE_REST)]
    arguments += [*expected(environment.name), f"--expect-django={environment.django}"]
    run("pytest", *arguments, python=environment.make(python))


def without(tests: Sequence[str]) -> tuple[str, ...]:
    """Return the options that leave tests to another stage."""
    return tuple(f"--ignore={each}" for each in tests)


def expected(stage: str, database: str = "postgresql") -> tuple[str, ...]:
    """Return the options that fail a stage which ran elsewhere, or ran too few tests."""
    return (f"--expect-database={database}", f"--expect-passed={LEAST[stage]}")


def stages() -> Mapping[str, Stage]:
    """Return the stages in their order; the Django of this environment needs no other."""
    own = version("Django")
    others = [each for each in ENVIRONMENTS if not own.startswith(f"{each.django}.")]
    return {
        "lint": ("style, format and types", lint),
        "docs": ("the documentation", docs),
        "postgresql": (f"the contract and the schedules on PostgreSQL, Django {own}", postgresql),
        "programs": (f"processes and servers, on PostgreSQL with Django {own}", programs),
        "mariadb": ("the contract on MariaDB", mariadb),
        "sqlite": ("the contract on SQLite", sqlite),
        "psycopg2": ("what knows the driver, with psycopg2", psycopg2),
        "mutants": ("ten faults that a test has to find", faults),
        **{each.name: (str(each), partial(other_django, each)) for each in others},
        "speed": ("speeds side by side", speed),
    }


def run(module: str, *arguments: str, python: str = sys.executable, **variables: str) -> None:
    """Run a Python module with the arguments; raise ``StageFailedError`` if it fails."""
    if call(module, *arguments, python=python, **variables) != 0:
        raise StageFailedError


def call(module: str, *arguments: str, python: str = sys.executable, **variables: str) -> int:
    """Run a Python module with the arguments, and return its exit code."""
    return subprocess.call([python, "-m", module, *arguments], env={**os.environ, **variables})


def install_servers() -> None:
    """Install, as far as we may, what tests beside PostgreSQL; those that miss it are skipped."""
    is_there = {"redis-server": redis_is_installed(), "pgbouncer": pgbouncer_is_installed()}
    if missing := [package for package, installed in is_there.items() if not installed]:
        apt_install(*missing)


def has_driver() -> bool:
    return subprocess.call([sys.executable, "-c", "import MySQLdb"], stderr=subprocess.DEVNULL) == 0


def install_mariadb() -> None:
    """Install the server, and the driver, which has to be compiled, as far as we may."""
    apt_install(*MARIADB_PACKAGES)
    if not mariadb_is_installed():
        raise LeftOutError(f"MariaDB is not installed (packages: {', '.join(MARIADB_PACKAGES)})")
    if not has_driver():
        quietly(sys.executable, "-m", "pip", "install", "--editable", ".[mysql]")
    if not has_driver():
        raise LeftOutError(
            "the driver mysqlclient could not be compiled "
            f"(packages: {', '.join(MARIADB_PACKAGES)})"
        )


def apt_install(*packages: str) -> None:
    """Install Debian packages if this is Debian, and we are root."""
    if os.geteuid() == 0 and shutil.which("apt-get") is not None:
        print(f"Installing {', '.join(packages)} with apt-get", flush=True)
        quietly("apt-get", "update")
        quietly("apt-get", "install", "--yes", "--no-install-recommends", *packages)


def quietly(*command: str) -> None:
    """Run a command that may fail: what it should have brought is looked for afterwards."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    finished = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    if finished.returncode != 0:
        print(finished.stdout.decode(errors="replace")[-2000:], flush=True)


def main(names: Sequence[str]) -> int:
    """Run the stages named, or all; return 1 if one failed, or was left out in CI."""
    known = stages()
    unknown = [name for name in names if name not in known]
    if unknown:
        print(f"Expected stages out of {', '.join(known)}; got {', '.join(unknown)}.")
        return 2
    failed, left_out = [], []
    for name in names or known:
        what, stage = known[name]
        print(f"\n=== {name}: {what}", flush=True)
        try:
            stage()
        except (StageFailedError, EnvironmentBrokenError):
            failed.append(name)
        except LeftOutError as reason:
            left_out.append(name)
            print(f"Left out: {name}, because {reason}.", flush=True)
    if left_out and os.environ.get("CI") == "true":
        failed += [f"{name} (left out)" for name in left_out]
    print(f"\n=== {verdict(failed, left_out)}", flush=True)
    return 1 if failed else 0


def everything() -> int:
    """Run all stages; those that take longest begin."""
    # Before there are several at once, which would wait for each other's apt-get, and fail.
    install_servers()
    if not (mariadb_is_installed() and has_driver()):
        # The stages that need it say themselves what is missing.
        with suppress(LeftOutError):
            install_mariadb()
    names = [name for name in stages() if name not in ALONE]
    names.sort(key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))
    commands = {name: (sys.executable, "-m", "tests.suite", name) for name in names}
    print(f"Running {', '.join(names)}, side by side", flush=True)
    # One more than there are processors: tests of processes wait a good part of their time.
    return side_by_side(commands, most=1 + (os.cpu_count() or 1)) or main(ALONE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) if sys.argv[1:] else everything())
