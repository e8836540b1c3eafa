"""Processes that are made to be killed: forked from one that is ready, which is cheap."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any

import pytest
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created

from dcl_processor import BatchProcessor
from tests.contract.support.errands import sessions
from tests.crash import processors, trace
from tests.crash.trace import Boundary, Trace
from tests.databases import database_url
from tests.waiting import PATIENCE, Late, join, until

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
    act: Callable[[BatchProcessor[Any]], Any] = BatchProcessor.run,
) -> tuple[int | None, list[Boundary], Any]:
    """Run the named processor, or do with it what ``act`` does, in a process of its own.

    Returns the process's exit code and, if it came to its end, what it passed, and the report or
    what ``act`` has returned. The sessions of the process have ended, too, so that its locks are
    released.
    """
    before = sessions()
    ours, theirs = _fork.Pipe(duplex=False)
    process = _fork.Process(target=_victim, args=(theirs, name, audit, rows, kill_at, act))
    process.start()
    theirs.close()
    boundaries: list[Boundary] = []
    result = None
    try:
        if not ours.poll(PATIENCE):
            process.kill()
            raise Late(f"the end of {name}")
        boundaries, result = ours.recv()
    except EOFError:
        pass
    finally:
        try:
            join(process)
        finally:
            process.kill()
        code = process.exitcode
        process.close()
    until(lambda: sessions() <= before, "the end of its sessions")
    return code, boundaries, result


def run_until_renewal(processor: BatchProcessor[Any], *, when: str) -> None:
    """Run, and die ``before`` or ``after`` the heartbeat first renews a lease."""

    def die(execute: Callable[..., Any], sql: str, *args: Any) -> Any:
        is_renewal = sql.startswith("UPDATE")
        if is_renewal and when == "before":
            trace.die()
        result = execute(sql, *args)
        if is_renewal:
            trace.die()
        return result

    def watch(connection: BaseDatabaseWrapper, **_: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            connection.execute_wrappers.append(die)

    connection_created.connect(watch)
    processor.run()


def _victim(
    pipe: Connection,
    name: str,
    audit: str,
    rows: frozenset[int],
    kill_at: tuple[int, str] | None,
    act: Callable[[BatchProcessor[Any]], Any],
) -> None:
    os.environ["AUDIT"] = audit
    trace.current = Trace(rows, kill_at)
    with trace.current.watching():
        result = act(getattr(processors, name))
    pipe.send((trace.current.boundaries, result))
