"""Several workers (copies) on this machine: they share the rows of a run, or watch side by side."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypedDict, Unpack

from dcl_processor import backlog, registry
from dcl_processor.diagnosis import Trouble
from dcl_processor.exceptions import InvalidOption
from dcl_processor.execution import failed_elsewhere
from dcl_processor.processor import BatchProcessor
from dcl_processor.report import COUNTS, Report, Stopped
from dcl_processor.runner.counters import MOST_FAILURES
from dcl_processor.signals import OnRow, row_callback
from dcl_processor.watch.polling import BACKOFF
from dcl_processor.watch.watch import Event, Plan, Watch

from .child import Send
from .graceful_stop import Stop
from .supervisor import Died, News, Supervisor

#: Processes that one command may start: far more than a machine can use.
MOST_COPIES = 256


class RunOptions(TypedDict, total=False):
    """Options of ``BatchProcessor.run()``."""

    using: str | None
    limit: int | None
    max_failures: int | None
    timeout: float | None
    wait_for_slot: float
    concurrency: int | None


def run(
    processor: BatchProcessor[Any],
    *,
    copies: int = 1,
    stop: threading.Event,
    on_row: OnRow | None = None,
    **options: Unpack[RunOptions],
) -> tuple[Report, list[Report | Trouble]]:
    """Run the processor in ``copies`` workers; return the report, and each worker's outcome.

    ``limit`` is for all workers together: it is divided before they start. ``concurrency`` is for
    each. ``on_row`` is called with each row's outcome. With one worker, the run is in this process.

    A worker that dies, or cannot be started, costs the others nothing. Raises ``InvalidOption`` for
    less than one worker, and ``Unsupported`` where other processes could not see the rows.
    """
    check_copies(copies)
    needed = 1
    if copies > 1:
        # No worker is started without a pending row and a slot for it.
        most = min(copies, processor.max_workers or copies)
        needed = min(most, backlog.count(processor, using=options.get("using"), most=most - 1))
    if needed < 2:
        with row_callback(processor, on_row):
            report = processor.run(**options, stop=stop)
        return report, [report] if copies > 1 else []

    limit = options.get("limit")
    limits = shares(limit, needed)
    timeout = options.get("timeout")
    # Processes share the monotonic clock.
    deadline = None if timeout is None else time.monotonic() + timeout
    outcomes: dict[int, Report | Trouble] = {}

    def work(number: int) -> partial[bool]:
        own: RunOptions = {**options, "limit": limits[number - 1]}
        wanted = on_row is not None
        return partial(
            _run, processor.name, own, deadline=deadline, sends_rows=wanted, failed=failed
        )

    def tell(number: int, _: str | None, event: News) -> None:
        match event:
            case str() if on_row is not None:
                on_row(event)
            case Report() | Trouble():
                outcomes[number] = event
            case Died():
                # A worker that dies after its report has done all of its work.
                outcomes.setdefault(number, event.trouble)

    with failed_elsewhere.shared() as failed:
        Supervisor(len(limits), work, stop=stop, tell=tell).run()
    in_order = [outcomes[number] for number in sorted(outcomes)]
    report = merge(processor.name, in_order, limit)
    return report if in_order else replace(report, stopped="signal"), in_order


def _run(
    name: str,
    options: RunOptions,
    stop: Stop,
    send: Send,
    *,
    deadline: float | None,
    sends_rows: bool,
    failed: Path | None,
) -> bool:
    """Do a share of a run, in a child process; send its report, or why there is none.

    ``failed``: the file of the rows that failed in one of the workers.
    """
    (processor,) = registry.get([name])
    if deadline is not None:
        options["timeout"] = max(0.0, deadline - time.monotonic())
    outcome: Report | Trouble
    try:
        with (
            failed_elsewhere.joined(failed, [name], is_one_run=True),
            row_callback(processor, partial(send, name) if sends_rows else None),
        ):
            outcome = processor.run(**options, stop=stop)
    except Exception as error:  # noqa: BLE001  # a run that could not be made
        outcome = Trouble.of(error, processor, options.get("using"))
    send(name, outcome)
    return True


def merge(name: str, copies: Sequence[Report | Trouble], limit: int | None) -> Report:
    """Return one report of all workers; a worker that died without a report counts nothing.

    Several workers may try a row that fails. It counts once, as long as all failures are kept.
    """
    own = [copy.report if isinstance(copy, Trouble) else copy for copy in copies]
    reports = [report for report in own if report is not None]
    retried = sum(report.retried for report in reports)
    counts = {count: sum(getattr(report, count) for report in reports) for count in COUNTS}
    # Rows that one worker found held may have been handled by another, until the last one ended.
    last = max(reports, key=lambda report: report.duration, default=None)
    counts["held"] = 0 if last is None else last.held
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
        held_keys=() if last is None else last.held_keys,
    )


def _stopped(reasons: set[Stopped], reached_limit: bool) -> Stopped:
    # If one worker reached its share of the limit while another worker found no more rows, the run
    # was drained all the same.
    order: tuple[Stopped, ...] = ("failures", "signal", "timeout")
    for reason in order:
        if reason in reasons:
            return reason
    if reached_limit:
        return "limit"
    return "busy" if "busy" in reasons and "drained" not in reasons else "drained"


def shares(limit: int | None, copies: int) -> list[int | None]:
    """Divide a limit as evenly as possible; leave out workers that could handle no row."""
    if limit is None:
        return [None] * copies
    each, rest = divmod(limit, copies)
    shares: list[int | None] = [each + (number < rest) for number in range(copies)]
    return [share for share in shares if share] or [0]


def watch(
    processors: Sequence[BatchProcessor[Any]],
    plan: Plan,
    *,
    copies: int = 1,
    stop: threading.Event,
    tell: Callable[[int | None, str | None, News], None],
) -> bool:
    """Watch in ``copies`` workers; return whether one had a processor to run until the end.

    ``max_rows`` of the plan is for all workers together. ``tell`` gets the worker's number, the
    processor's name, and what happened. With one worker, the watch is in this process, and its
    number is ``None``; of several, one that dies is started again, or a spare takes its place.
    Raises as ``run()`` does.
    """
    check_copies(copies)
    if copies == 1:
        return Watch(processors, plan, stop, partial(tell, None)).run()

    names = [processor.name for processor in processors]
    rows_left = shares(plan.max_rows, copies)

    def work(number: int) -> partial[bool]:
        own = replace(plan, max_rows=rows_left[number - 1])
        return partial(_watch, names, own, failed=failed)

    def tell_or_count(number: int, name: str | None, event: News) -> None:
        if not isinstance(event, str):
            tell(number, name, event)
        elif (left := rows_left[number - 1]) is not None:
            # A row was tried: a worker that takes this one's place has one row less to try.
            rows_left[number - 1] = left - 1

    with failed_elsewhere.shared() as failed:
        return Supervisor(
            len(rows_left),
            work,
            stop=stop,
            tell=tell_or_count,
            restart=BACKOFF,
            deadline=plan.deadline,
        ).run()


def _watch(
    names: Sequence[str], plan: Plan, stop: Stop, send: Send, *, failed: Path | None
) -> bool:
    """Watch, in a child process; send each event, and the rows only if they are counted."""

    def tell(name: str, event: Event) -> None:
        if plan.max_rows is not None or not isinstance(event, str):
            send(name, event)

    with failed_elsewhere.joined(failed, names, is_one_run=False):
        return Watch(registry.get(names), plan, stop, tell).run()


def check_copies(copies: int) -> None:
    """Raise ``InvalidOption`` unless this number of processes can be started."""
    if not 1 <= copies <= MOST_COPIES:
        raise InvalidOption(
            f"expected copies to be a number of processes from 1 to {MOST_COPIES}, got {copies!r}."
        )
