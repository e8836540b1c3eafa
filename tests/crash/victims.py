"""Processes that are made to be killed: forked from one that is ready, which is cheap."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing import forkserver
from multiprocessing.connection import Connection

import pytest

from dcl_processor import Report
from tests.crash import processors, trace
from tests.crash.trace import Boundary, Trace
from tests.edge.manage import database_url

PATIENCE = 60.0  # seconds for one run

_fork = multiprocessing.get_context("forkserver")


def get_ready() -> None:
    """Start the process that the victims are forked from, for this suite's test database."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DATABASE_URL", database_url())
        patch.setenv("DJANGO_SETTINGS_MODULE", "tests.crash.settings")
        _fork.set_forkserver_preload(["pytest", "tests.crash.preload"])
        forkserver.ensure_running()


def run(
    name: str,
    audit: str,
    rows: frozenset[int] = frozenset(),
    kill_at: tuple[int, str] | None = None,
) -> tuple[int | None, list[Boundary], Report | None]:
    """Run the named processor in a process of its own.

    Returns the process's exit code and, if it came to its end, what it passed and reported.
    """
    ours, theirs = _fork.Pipe(duplex=False)
    process = _fork.Process(target=_victim, args=(theirs, name, audit, rows, kill_at))
    process.start()
    theirs.close()
    try:
        boundaries, report = ours.recv() if ours.poll(PATIENCE) else ([], None)
    except EOFError:
        boundaries, report = [], None
    process.join(PATIENCE)
    if process.is_alive():
        process.kill()
    code = process.exitcode
    process.close()
    return code, boundaries, report


def _victim(
    pipe: Connection,
    name: str,
    audit: str,
    rows: frozenset[int],
    kill_at: tuple[int, str] | None,
) -> None:
    os.environ["AUDIT"] = audit
    trace.current = Trace(rows, kill_at)
    with trace.current.watching():
        report = getattr(processors, name)()
    pipe.send((trace.current.boundaries, report))
