"""Several workers (copies) on this machine, which share the rows of one run."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from multiprocessing import connection
from threading import Event
from typing import Any

from django.db import connections

from dcl_processor.exceptions import InvalidOption, Unsupported
from dcl_processor.processor import BatchProcessor
from dcl_processor.report import COUNTS, Report, Stopped
from dcl_processor.runner.counters import MOST_FAILURES

from . import backlog
from .child import STOP, Share, Trouble
from .child_handle import Copy, start
from .row_callback import OnRow, watched
from .stopping import POLL, StoppedAtOnce

#: Processes that one command may start: far more than a machine can use.
MOST_COPIES = 256


def run(
    processor: BatchProcessor[Any],
    *,
    copies: int = 1,
    using: str | None = None,
    limit: int | None = None,
    timeout: float | None = None,
    concurrency: int | None = None,
    stop: Event,
    on_row: OnRow | None = None,
) -> tuple[Report, list[Report | Trouble]]:
    """Run the processor in ``copies`` workers; return the report, and each worker's outcome.

    The parameters are those of ``BatchProcessor.run()``; ``limit`` is for all workers together,
    ``concurrency`` for each, and ``on_row`` is called with each row's outcome. With one worker, the
    run is in this process.
    """
    check_copies(copies)
    if copies > 1:
        # No worker is started without a pending row for it.
        needed = min(copies, backlog.count(processor, using=using, most=copies - 1))
        if needed > 1:
            outcomes = run_copies(
                *(processor, needed),
                using=using,
                limit=limit,
                timeout=timeout,
                concurrency=concurrency,
                stop=stop,
                on_row=on_row,
            )
            report = merge(processor.name, outcomes, limit)
            return report if outcomes else replace(report, stopped="signal"), outcomes
    with watched(processor, on_row):
        report = processor.run(
            using=using, limit=limit, timeout=timeout, concurrency=concurrency, stop=stop
        )
    return report, [report] if copies > 1 else []


def run_copies(
    processor: BatchProcessor[Any],
    copies: int,
    *,
    using: str | None = None,
    limit: int | None = None,
    timeout: float | None = None,
    concurrency: int | None = None,
    stop: Event,
    on_row: OnRow | None = None,
) -> list[Report | Trouble]:
    """Run the processor in ``copies`` processes, and return the outcome of each.

    ``limit`` is for all workers together: it is divided before they start. ``timeout`` counts from
    now for each. ``on_row`` is called with each row's outcome. Raises ``Unsupported`` where other
    processes could not see the rows. A worker that dies, or cannot be started, costs the others
    nothing.
    """
    names = databases_for_others()
    deadline = None if timeout is None else time.monotonic() + timeout
    begun: list[Copy | Trouble] = []
    try:
        for number, limit_ in enumerate(shares(limit, copies), start=1):
            share = Share(
                name=processor.name,
                databases=names,
                using=using,
                limit=limit_,
                deadline=deadline,
                concurrency=concurrency,
                tells_rows=on_row is not None,
            )
            if stop.is_set():
                break
            start(f"{processor.name}, copy {number}", share, begun.append)
        _collect(_running(begun), stop, on_row or (lambda _: None))
    except StoppedAtOnce:
        for copy in _running(begun):
            copy.stop_at_once()
        raise
    finally:
        for copy in _running(begun):
            copy.end()
    outcomes = [each.outcome if isinstance(each, Copy) else each for each in begun]
    return [outcome for outcome in outcomes if outcome is not None]


def _running(begun: Sequence[Copy | Trouble]) -> list[Copy]:
    return [each for each in begun if isinstance(each, Copy)]


def merge(name: str, copies: Sequence[Report | Trouble], limit: int | None) -> Report:
    """Return one report of all workers; a worker that died without a report counts nothing.

    Several workers may try a row that fails. It counts once, as long as all failures are kept.
    """
    own = [copy.report if isinstance(copy, Trouble) else copy for copy in copies]
    reports = [report for report in own if report is not None]
    retried = sum(report.retried for report in reports)
    counts = {count: sum(getattr(report, count) for report in reports) for count in COUNTS}
    tried = sum(counts[count] for count in ("processed", "failed", "discarded", "snoozed"))
    failures = {str(failure.pk): failure for report in reports for failure in report.failures}
    if all(report.failed == len(report.failures) for report in reports):
        counts["failed"] = len(failures)
        retried = sum(not failure.is_final for failure in failures.values())
    return Report(
        name=name,
        **counts,
        retried=retried,
        passes=max((report.passes for report in reports), default=0),
        duration=max((report.duration for report in reports), default=0.0),
        stopped=_stopped(
            {report.stopped for report in reports},
            limit is not None and tried >= limit,
        ),
        error=next((report.error for report in reports if report.error is not None), None),
        failures=tuple(islice(failures.values(), MOST_FAILURES)),
    )


def _stopped(reasons: set[Stopped], reached_limit: bool) -> Stopped:
    # If one worker reached its share of the limit while another worker found no more rows, the run
    # was drained all the same.
    order: tuple[Stopped, ...] = ("failures", "signal", "timeout")
    for reason in order:
        if reason in reasons:
            return reason
    return "limit" if reached_limit else "drained"


def shares(limit: int | None, copies: int) -> list[int | None]:
    """Divide a limit as evenly as possible; leave out workers that could handle no row."""
    if limit is None:
        return [None] * copies
    each, rest = divmod(limit, copies)
    shares: list[int | None] = [each + (number < rest) for number in range(copies)]
    return [share for share in shares if share] or [0]


def _collect(running: Sequence[Copy], stop: Event, on_row: OnRow) -> None:
    waiting = {copy.results: copy for copy in running}
    told = False
    while waiting:
        if stop.is_set() and not told:
            told = True
            for copy in running:
                copy.tell(STOP)
        for ready in connection.wait(list(waiting), POLL):
            copy = next(copy for copy in waiting.values() if copy.results is ready)
            if copy.hear(on_row):
                del waiting[copy.results]


def check_copies(copies: int) -> None:
    """Raise ``InvalidOption`` unless this number of processes can be started."""
    if not 1 <= copies <= MOST_COPIES:
        raise InvalidOption(
            f"expected copies to be a number of processes from 1 to {MOST_COPIES}, got {copies!r}."
        )


def databases_for_others() -> dict[str, Any]:
    """Return the databases' names by alias; close own connections until the workers have ended.

    Raises ``Unsupported`` where other processes could not see the rows.
    """
    _refuse_what_only_we_can_see()
    connections.close_all()
    return {alias: database["NAME"] for alias, database in connections.databases.items()}


def _refuse_what_only_we_can_see() -> None:
    if "DJANGO_SETTINGS_MODULE" not in os.environ:
        raise Unsupported(
            "expected DJANGO_SETTINGS_MODULE to name the settings, got settings made by "
            "configure(), which other processes cannot read; run one copy."
        )
    for connected in connections.all(initialized_only=True):
        if connected.in_atomic_block:
            raise Unsupported(
                f"expected no open transaction on {connected.alias!r}, got one: copies are other "
                "processes, which see only what is committed; in tests use TransactionTestCase."
            )
    for alias in connections:
        in_memory: Any = getattr(connections[alias], "is_in_memory_db", None)
        if in_memory is not None and in_memory():
            raise Unsupported(
                f"expected a database that other processes can open, got {alias!r} in this "
                "process's memory; use a file, or run one copy."
            )
