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

from tests.admin_page.chromium import is_installed as chromium_is_installed
from tests.environments import ENVIRONMENTS, Environment, EnvironmentBrokenError
from tests.progress import side_by_side, verdict
from tests.servers.mariadb import is_installed as mariadb_is_installed
from tests.servers.pgbouncer import is_installed as pgbouncer_is_installed
from tests.servers.redis import is_installed as redis_is_installed

Stage = tuple[str, Callable[[], None]]

CONTRACT = ("tests/contract", "tests/crash", "tests/fuzz", "tests/ledger")
#: Searches: every schedule of two workers, and what finds the variants that are wrong.
SCHEDULES = ("tests/explorer", "tests/fuzz/test_broken.py")
#: Workers that are killed, and workers in large numbers.
PROGRAMS = (
    "tests/benchmarks",
    "tests/chaos",
    "tests/crash",
    "tests/keys",
    "tests/production",
    "tests/race",
    "tests/test_fourth_delivery.py",
    "tests/test_pools.py",
    "tests/test_uncompiled.py",
)
#: What users and contributors start: the pages, the shop with its servers, Celery, this suite.
PAGES = (
    "tests/cluster",
    "tests/docs",
    "tests/sample_app",
    "tests/test_embedded.py",
    "tests/test_mutants.py",
    "tests/test_strict.py",
    "tests/typing",
)
#: Tests of the command and of the pages, by the programs that operators use.
COMMANDS = (
    "tests/admin_page/test_browser.py",
    "tests/admin_page/test_size.py",
    "tests/edge",
    "tests/ledger/test_commands.py",
)
# Schedules, processes, servers and other packages are the same under each Django: once is enough.
# What Django makes of a question, and what becomes of it in a race, is in the contract.
ABOUT_THE_REST = (
    "tests/admin_page/test_browser.py",
    "tests/admin_page/test_size.py",
    "tests/benchmarks",
    "tests/chaos",
    "tests/cluster",
    "tests/contract/test_garbage.py",
    "tests/contract/test_histories.py",
    "tests/contract/test_interrupts.py",
    "tests/crash",
    "tests/docs",
    "tests/edge/test_dry_run.py",
    "tests/edge/test_endings.py",
    "tests/edge/test_error_dedup.py",
    "tests/edge/test_headway.py",
    "tests/edge/test_health.py",
    "tests/edge/test_idle.py",
    "tests/edge/test_in_flight.py",
    "tests/edge/test_killed.py",
    "tests/edge/test_listener.py",
    "tests/edge/test_metrics.py",
    "tests/edge/test_operation.py",
    "tests/edge/test_polling.py",
    "tests/edge/test_restarts.py",
    "tests/edge/test_spare.py",
    "tests/edge/test_stuck.py",
    "tests/edge/test_stuck_actions.py",
    "tests/edge/test_stuck_night.py",
    "tests/edge/test_supervisor.py",
    "tests/edge/test_visible.py",
    "tests/edge/test_watch.py",
    "tests/edge/test_workers.py",
    "tests/explorer",
    "tests/fuzz/test_broken.py",
    "tests/keys",
    "tests/ledger/test_commands.py",
    "tests/production",
    "tests/race",
    "tests/sample_app/test_demo.py",
    "tests/sample_app/test_payments.py",
    "tests/sample_app/test_warehouse.py",
    "tests/test_embedded.py",
    "tests/test_fourth_delivery.py",
    "tests/test_histories.py",
    "tests/test_mutants.py",
    "tests/test_packaging.py",
    "tests/test_strict.py",
    "tests/test_suite.py",
    "tests/test_uncompiled.py",
)
#: What knows Django: what it makes of a queryset, its transactions, its checks, commands and admin.
ABOUT_DJANGO = (
    *(
        f"tests/contract/test_{name}.py"
        for name in (
            *("async", "at_least_once", "at_most_once", "bad_input", "batches", "dry_run", "flips"),
            *("groups_related", "instances", "invariants", "isolation", "leftovers"),
            *("lost_transactions", "mail_queues", "one_message", "operator_actions", "own_row"),
            *("own_values", "process_batch", "row_savepoints", "run", "settle_later", "shapes"),
            *("shapes_fresh", "shapes_one_statement", "shapes_wanted", "shapes_windows"),
            *("transaction_guard", "two_tables", "wrong_flips"),
        )
    ),
    "tests/admin_page",
    "tests/edge/test_checks.py",
    "tests/edge/test_command.py",
    "tests/edge/test_registry.py",
    "tests/test_calls.py",
    "tests/test_candidates.py",
    "tests/test_compiled_sql.py",
    "tests/test_counts.py",
    "tests/test_django_internals.py",
    "tests/test_locking.py",
    "tests/test_pending_index.py",
    "tests/test_pools.py",
    "tests/test_question.py",
    "tests/test_tables.py",
)
#: What knows the driver: transactions, their ends and levels, and sessions that are lost.
ABOUT_THE_DRIVER = tuple(
    f"tests/contract/test_{name}.py"
    for name in (
        "at_least_once",
        "at_most_once",
        "contention",
        "isolation",
        "leases",
        "leftovers",
        "lost_transactions",
        "operator_actions",
        "row_savepoints",
        "run",
        "servers_end",
        "transaction_guard",
    )
)
MARIADB_PACKAGES = ("mariadb-server", "libmariadb-dev", "pkg-config", "gcc", "python3-dev")

#: What PostgreSQL runs with one Django is run again with one in so many sets of parameters;
#: ``make whole`` runs each set.
SHARED = ("--share=6",)
#: Each of these tests starts processes, for each set of parameters.
SHARED_COMMANDS = ("--share=3",)

#: Stages that take longest, in this order.
FIRST = (
    "postgresql",
    "django6.1",
    "programs",
    "commands",
    "pages",
    "schedules",
    "mariadb",
    "sqlite",
    "django6.0",
)
#: Stages that need the machine for themselves.
ALONE = ("speed",)
#: Tests that have to pass in a stage, at least: so few mean that some were not collected.
LEAST = {
    "postgresql": 3300,
    "schedules": 150,
    "programs": 330,
    "pages": 620,
    "commands": 560,
    "mariadb": 1200,
    "sqlite": 1150,
    "psycopg2": 460,
    "django5.2": 1800,
    "django6.0": 1800,
    "django6.1": 1800,
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
    """Run on PostgreSQL what needs no process but its own, and is no other Django's turn."""
    others = (*SCHEDULES, *PROGRAMS, *PAGES, *COMMANDS)
    here = turn(None, always=(*ABOUT_DJANGO, *ABOUT_THE_REST))
    run("pytest", *without(others), *here, *expected("postgresql"))


def schedules() -> None:
    """Run on PostgreSQL the searches that take longest."""
    run("pytest", *SCHEDULES, *expected("schedules"))


def programs() -> None:
    """Run on PostgreSQL workers that are killed, and many at once."""
    install_servers()
    run("pytest", *PROGRAMS, *expected("programs"))


def pages() -> None:
    """Run on PostgreSQL what the pages describe, with its servers."""
    install_servers()
    run("pytest", *PAGES, *expected("pages"))


def commands() -> None:
    """Run on PostgreSQL the command, and the pages in a browser."""
    install_servers()
    run("pytest", *COMMANDS, *SHARED_COMMANDS, *expected("commands"))


def mariadb() -> None:
    """Run the contract suite on a private MariaDB."""
    if not (mariadb_is_installed() and has_driver()):
        install_mariadb()
    tests = (*CONTRACT, "tests/test_servers.py", *expected("mariadb", "mysql"))
    run("tests.servers.mariadb", "--", sys.executable, "-m", "pytest", *tests, *SHARED)


def sqlite() -> None:
    """Run the contract suite on SQLite."""
    # The settings name a temporary file for the test database; this one is never opened.
    url = "sqlite:////nonexistent/dcl.sqlite3"
    run("pytest", *CONTRACT, *expected("sqlite", "sqlite"), *SHARED, DATABASE_URL=url)


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
    """Run under another Python and Django what knows Django, and the tests whose turn it is."""
    python = environment.find_python()
    if python is None:
        raise LeftOutError(
            f"Python {environment.python} with its venv module was not found "
            f"(name it with {environment.variable}=…)"
        )
    arguments = [*without(ABOUT_THE_REST), *turn(environment, always=ABOUT_DJANGO), *SHARED]
    arguments += [*expected(environment.name), f"--expect-django={environment.django}"]
    run("pytest", *arguments, python=environment.make(python))


def turn(environment: Environment | None, always: Sequence[str]) -> tuple[str, ...]:
    """Return the options that run the tests of one turn; ``None``: that of this Django.

    A Django that cannot be had here has no turn.
    """
    turns = [None, *(each for each in other_environments() if each.find_python())]
    number = f"{turns.index(environment)}/{len(turns)}"
    return (f"--turn={number}", *(f"--always={each}" for each in always))


def other_environments() -> list[Environment]:
    """Return those of the Djangos that this environment has not got."""
    own = version("Django")
    return [each for each in ENVIRONMENTS if not own.startswith(f"{each.django}.")]


def without(tests: Sequence[str]) -> tuple[str, ...]:
    """Return the options that leave tests to another stage."""
    return tuple(f"--ignore={each}" for each in tests)


def expected(stage: str, database: str = "postgresql") -> tuple[str, ...]:
    """Return the options that fail a stage which ran elsewhere, or ran too few tests."""
    return (f"--expect-database={database}", f"--expect-passed={LEAST[stage]}")


def stages() -> Mapping[str, Stage]:
    """Return the stages in their order; the Django of this environment needs no other."""
    own = version("Django")
    return {
        "lint": ("style, format and types", lint),
        "docs": ("the documentation", docs),
        "postgresql": (f"the contract on PostgreSQL, Django {own}", postgresql),
        "schedules": (f"every schedule of two workers, Django {own}", schedules),
        "programs": (f"killed workers, on PostgreSQL with Django {own}", programs),
        "pages": (f"the pages and the shop, on PostgreSQL with Django {own}", pages),
        "commands": (f"the command and the pages, on PostgreSQL with Django {own}", commands),
        "mariadb": ("the contract on MariaDB", mariadb),
        "sqlite": ("the contract on SQLite", sqlite),
        "psycopg2": ("what knows the driver, with psycopg2", psycopg2),
        "mutants": ("ten faults that a test has to find", faults),
        **{each.name: (str(each), partial(other_django, each)) for each in other_environments()},
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
    is_there = {
        "redis-server": redis_is_installed(),
        "pgbouncer": pgbouncer_is_installed(),
        "chromium": chromium_is_installed(),
    }
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
    # Twice as many as there are processors: tests of processes wait a good part of their time.
    return side_by_side(commands, most=2 * (os.cpu_count() or 1)) or main(ALONE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) if sys.argv[1:] else everything())
