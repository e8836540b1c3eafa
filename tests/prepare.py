"""Brings all that the stages need, before the first test: nothing is downloaded while tests run.

What this machine cannot have is left out, with the reason.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from pathlib import Path

from tests.environments import CHECKOUT, ENVIRONMENTS
from tests.servers import chromium, mariadb, pgbouncer, postgresql, redis

TRIES, PAUSE = 3, 5.0  # seconds between two
MARIADB = ("mariadb-server", "libmariadb-dev", "pkg-config", "gcc", "python3-dev")


class PrepareFailedError(Exception):
    """A download or an installation failed each time; the message ends with what was printed."""


def prepare(log: Path, djangos: Iterable[str], databases: Collection[str]) -> Mapping[str, str]:
    """Install what is missing; return what cannot be had, with its reason: "mariadb", "6.0" ….

    Raises ``PrepareFailedError``.
    """
    needs_mariadb = "mariadb" in databases
    log.unlink(missing_ok=True)
    wanted = [each for each in ENVIRONMENTS if each.django in djangos]
    pythons = {each: each.find_python() for each in wanted}
    with ThreadPoolExecutor() as pool:
        tasks = [pool.submit(_servers, log, databases)]
        tasks += [
            pool.submit(each.make, python, partial(_call, log))
            for each, python in pythons.items()
            if python is not None
        ]
    for task in tasks:
        task.result()
    missing = {
        each.django: f"Python {each.python} with its venv module was not found "
        f"(name it with {each.variable}=…)"
        for each, python in pythons.items()
        if python is None
    }
    if needs_mariadb and not (mariadb.is_installed() and _has_driver()):
        missing["mariadb"] = f"MariaDB is not installed (packages: {', '.join(MARIADB)})"
    if "debian" in databases and not postgresql.is_installed():
        missing["debian"] = "PostgreSQL is not installed (package: postgresql)"
    return missing


def _servers(log: Path, databases: Collection[str]) -> None:
    """Install servers with apt-get if this is Debian, and we are root; then MariaDB's driver."""
    needs_mariadb = "mariadb" in databases
    is_there = {
        "postgresql": "debian" not in databases or postgresql.is_installed(),
        "redis-server": redis.is_installed(),
        "pgbouncer": pgbouncer.is_installed(),
        "chromium": chromium.is_installed(),
    }
    packages = [name for name, installed in is_there.items() if not installed]
    if needs_mariadb and not (mariadb.is_installed() and _has_driver()):
        packages += MARIADB
    if packages and os.geteuid() == 0 and shutil.which("apt-get") is not None:
        _call(log, "apt-get", "update")
        _call(log, "apt-get", "install", "--yes", "--no-install-recommends", *packages)
    if needs_mariadb and mariadb.is_installed() and not _has_driver():
        _call(log, sys.executable, "-m", "pip", "install", "--editable", ".[mysql]")


def own_django() -> str:
    """Return the release of the Django of this environment, as "5.2"."""
    return ".".join(version("Django").split(".")[:2])


def _has_driver() -> bool:
    return subprocess.call([sys.executable, "-c", "import MySQLdb"], stderr=subprocess.DEVNULL) == 0


def _call(log: Path, *command: str) -> None:
    """Run a command, and again if it fails: a network may be away for a moment."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for number in range(TRIES):
        time.sleep(PAUSE if number else 0)
        done = subprocess.run(
            command,
            cwd=CHECKOUT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        with log.open("a") as file:
            file.write(f"$ {' '.join(command)}\n{done.stdout}")
        if done.returncode == 0:
            return
    raise PrepareFailedError(f"{' '.join(command)}\n{done.stdout[-1500:]}")
