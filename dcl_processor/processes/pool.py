"""Workers on this machine: they share the rows of a run, or watch side by side.

One worker is this process itself, unless its handlers have a ``handler_timeout``: a process cannot
end its own handler that ignores every interrupt, so such a worker is a child, with a supervisor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from django.core.exceptions import ImproperlyConfigured
from django.db.models import Q

from dcl_processor import backlog, observers, oversight, registry, worker
from dcl_processor import steady as time
from dcl_processor.diagnosis import Trouble
from dcl_processor.exceptions import InvalidOption, Unsupported
from dcl_processor.processor import BatchProcessor
from dcl_processor.report import COUNTS, Report, Stopped
from dcl_processor.runner.counters import MOST_FAILURES
from dcl_processor.signals import OnRow, row_callback, workers_counted
from dcl_processor.watch.polling import BACKOFF
from dcl_processor.watch.watch import Counted, Event, Plan, Watch

from .child import Send
from .graceful_stop import Stop
from .health import Health
from .monitor import Monitor
from .news import Died, Finishing, News, Tell
from .results import Outcomes
from .supervisor import Supervisor, check_children_can_see_rows
from .visible import as_worker, label

if TYPE_CHECKING:
    from dcl_processor.metrics import Tally

#: Takes a processor's name, and what one of several workers has counted since its last message.
OnCounts = Callable[[str, "Tally"], None]

#: Processes that one command may start: far more than a machine can use.
MOST_WORKERS = 256


class RunOptions(TypedDict, total=False):
    """Options of ``BatchProcessor.run()``."""

    filter: Q | None
    using: str | None
    limit: int | None
    timeout: float | None
    concurrency: int | None


def run(
    processor: BatchProcessor[Any],
    *,
    workers: int = 1,
    stop: Stop,
    on_row: OnRow | None = None,
    on_counts: OnCounts | None = None,
    health: Health | None = None,
    may_supervise: bool = False,
    on_finishing: Callable[[int, Finishing], None] = lambda *_: None,
    **options: Unpack[RunOptions],
) -> tuple[Report, list[Report | Trouble]]:
    """Run the processor in so many workers; return the report, and each worker's outcome.

    ``limit`` is for all workers together: it is divided before they start. ``concurrency`` is for
    each. ``on_row`` is called with each row's outcome, ``on_counts`` with what a worker of several
    has counted, about once a second, and ``on_finishing`` with the last rows of each worker that
    is stopped. With one worker, the run is in this process, and there is no outcome; with
    ``may_supervise`` it is in a child if the processor has a ``handler_timeout``, and there is an
    outcome if the worker was lost.

    A worker that dies, or cannot be started, costs the others nothing. One that is killed because
    its handler does not end is started again, unless its row had cost a worker before. Raises
    ``InvalidOption`` for less than one worker, and ``Unsupported`` where other processes could not
    see the rows.
    """
    check_workers(workers)
    health = health or Health([processor.name], stop)
    supervised = may_supervise and _can_be_killed([processor])
    with oversight.command("run", [processor.name]) as record:
        # Not longer, because a supervisor shows the health of its workers instead.
        with _monitored(health):
            needed = _needed(processor, workers, options) if workers > 1 or supervised else 1
            if needed == 0 or (needed == 1 and not supervised):
                with row_callback(processor, on_row):
                    report = processor.run(**options, stop=stop)
                if record is not None:
                    record.ended(processor.name, report)
                return report, [report] if workers > 1 else []

        outcomes = Outcomes(
            processor.name, shares(options.get("limit"), needed), on_row, on_finishing
        )
        in_order = _run_workers(
            processor,
            outcomes,
            options,
            sends_rows=on_row is not None,
            record=record,
            health=health,
            on_counts=on_counts,
        )
        report = merge(processor.name, in_order, options.get("limit"))
        tell_of_success(report, in_order, on_counts)
        if not in_order:
            report = replace(report, stopped="signal" if stop.is_set() else "timeout")
        if record is not None:
            record.ended(processor.name, report)
    is_lost = any(isinstance(each, Trouble) for each in in_order)
    return report, in_order if workers > 1 or is_lost else []


def _run_workers(
    processor: BatchProcessor[Any],
    outcomes: Outcomes,
    options: RunOptions,
    *,
    sends_rows: bool,
    record: oversight.Command | None,
    health: Health,
    on_counts: OnCounts | None,
) -> list[Report | Trouble]:
    """Run the processor in one child for each share of the limit; return each one's outcome."""
    timeout = options.get("timeout")
    # Processes share the monotonic clock.
    deadline = None if timeout is None else time.monotonic() + timeout
    sends_counts, began = are_counts_wanted(on_counts), time.time()

    def work(number: int) -> partial[bool]:
        own: RunOptions = {**options, "limit": outcomes.limits[number - 1]}
        return partial(
            _run,
            processor.name,
            own,
            shown=label([processor.name], number, len(outcomes.limits)),
            stops=_stops(record, number),
            began=began,
            deadline=deadline,
            sends_rows=sends_rows or own["limit"] is not None,
            sends_counts=sends_counts,
        )

    def tell(number: int, name: str | None, event: News) -> None:
        if isinstance(event, Counted):
            counted(processor, event.tally, on_counts)
        else:
            outcomes.tell(number, name, event)

    Supervisor(
        len(outcomes.limits),
        work,
        stop=health.stop,
        tell=_recording(record, tell),
        deadline=deadline,
        limit=processor._time_limit,
        goes_on=True,
        observe=health.seen,
    ).run()
    return outcomes.in_order()


def _can_be_killed(processors: Sequence[BatchProcessor[Any]]) -> bool:
    """Return whether handlers have a limit, and the work can be done in a child."""
    if all(processor._time_limit is None for processor in processors):
        return False
    try:
        check_children_can_see_rows()
    except (Unsupported, ImproperlyConfigured):
        # In a test's transaction, for instance, or without the driver of a database that no
        # processor uses: there the handlers are interrupted, and not killed.
        return False
    return True


@contextmanager
def _monitored(health: Health) -> Iterator[None]:
    """Show what this process is at, and warn of handlers that take long, in the block."""
    with Monitor(health.beat, health.stop, pace=health.pace):
        yield


def _needed(processor: BatchProcessor[Any], workers: int, options: RunOptions) -> int:
    """Return how many workers have a pending row, and a slot for it; the others are not started."""
    most = min(workers, processor.max_workers or workers)
    filter, using = options.get("filter"), options.get("using")
    return min(most, backlog.count(processor, filter=filter, using=using, most=most - 1))


def _run(
    name: str,
    options: RunOptions,
    stop: Stop,
    send: Send,
    *,
    shown: str,
    stops: Mapping[str, int | None],
    began: float,
    deadline: float | None,
    sends_rows: bool,
    sends_counts: bool,
) -> bool:
    """Do a share of a run, in a child process; send its report, or why there is none.

    ``shown``: the worker's name for people. ``stops``: the orders to stop that it is to ignore.
    ``began``: when the command did, in seconds since 1970.
    """
    (processor,) = registry.get([name])
    if deadline is not None:
        options["timeout"] = max(0.0, deadline - time.monotonic())
    worker.began = began
    outcome: Report | Trouble
    try:
        with (
            as_worker(shown),
            oversight.worker([name], send, stops),
            row_callback(processor, partial(send, name) if sends_rows else None),
            counts_sent(send, is_share=True) if sends_counts else nullcontext(),
        ):
            outcome = processor.run(**options, stop=stop)
    except Exception as error:  # noqa: BLE001  # a run that could not be made
        outcome = Trouble.of(error, processor, options.get("using"))
    send(name, outcome)
    observers.flush()
    return True


def are_counts_wanted(on_counts: OnCounts | None) -> bool:
    """Return whether workers are to send what they count: otherwise they count nothing."""
    return on_counts is not None or bool(workers_counted.receivers)


def counts_sent(send: Send, *, is_share: bool) -> AbstractContextManager[None]:
    """Send what is counted in the block to the parent; ``is_share``: of one run of several."""
    from dcl_processor.metrics import sent

    return sent(lambda name, tally: send(name, Counted(tally)), is_share=is_share)


def counted(processor: BatchProcessor[Any], tally: Tally, on_counts: OnCounts | None) -> None:
    """Hand on what a worker has counted."""
    if on_counts is not None:
        on_counts(processor.name, tally)
    if tally.rows:
        workers_counted.send_robust(type(processor), processor=processor, counts=dict(tally.rows))


def tell_of_success(
    report: Report, workers: Sequence[Report | Trouble], on_counts: OnCounts | None
) -> None:
    """Report the success of a run that several workers share; each sees only its own rows."""
    if on_counts is None or not all(isinstance(each, Report) for each in workers):
        return
    from dcl_processor.metrics import (
        Tally,
        succeeded,  # not for others
    )

    if workers and succeeded(report):
        on_counts(report.name, Tally(last_success=time.time()))


def merge(name: str, workers: Sequence[Report | Trouble], limit: int | None) -> Report:
    """Return one report of all workers; a worker that died without a report counts nothing.

    It lets the run end by ``"failures"``, unless something else ended the run. Several workers may
    try a row that fails. It counts once, as long as all failures are kept.
    """
    own = [worker.report if isinstance(worker, Trouble) else worker for worker in workers]
    reports = [report for report in own if report is not None]
    to_retry = sum(report.to_retry for report in reports)
    counts = {count: sum(getattr(report, count) for report in reports) for count in COUNTS}
    # Rows that one worker found held or locked may have been handled by another, until the last one
    # ended; and a row that a session keeps locked was met by each of them.
    last = max(reports, key=lambda report: report.duration, default=None)
    for count in ("held", "skipped"):
        counts[count] = 0 if last is None else getattr(last, count)
    tried = sum(counts[count] for count in ("processed", "failed", "discarded", "snoozed"))
    failures = {str(failure.pk): failure for report in reports for failure in report.failures}
    if all(report.failed == len(report.failures) for report in reports):
        counts["failed"] = len(failures)
        to_retry = sum(not failure.is_final for failure in failures.values())
    return Report(
        name=name,
        **counts,
        to_retry=to_retry,
        redone=sum(report.redone for report in reports),
        passes=max((report.passes for report in reports), default=0),
        duration=max((report.duration for report in reports), default=0.0),
        stopped=_stopped(
            {report.stopped for report in reports},
            limit is not None and tried >= limit,
            has_lost_one=None in own,
        ),
        error=next((report.error for report in reports if report.error is not None), None),
        failures=tuple(islice(failures.values(), MOST_FAILURES)),
        held_keys=() if last is None else last.held_keys,
    )


def _stopped(reasons: set[Stopped], reached_limit: bool, *, has_lost_one: bool) -> Stopped:
    # If one worker reached its share of the limit while another worker found no more rows, the run
    # was drained all the same.
    order: tuple[Stopped, ...] = (
        "failures",
        "signal",
        "operator",
        "paused",
        "breaker",
        "timeout",
        "throttled",
    )
    for reason in order:
        if reason in reasons:
            return reason
    if reached_limit:
        return "limit"
    if has_lost_one:
        return "failures"  # what it would have found is not known
    return "busy" if "busy" in reasons and "drained" not in reasons else "drained"


def _recording(record: oversight.Command | None, tell: Tell) -> Tell:
    """Return what gives the workers' progress to the record, and the rest to ``tell``."""

    def note(number: int, name: str | None, event: News) -> None:
        if not isinstance(event, oversight.Progress):
            if isinstance(event, Died) and record is not None:
                record.worker_died(number, event.trouble.sentence)
            tell(number, name, event)
        elif record is not None and name is not None:
            record.progress(number, name, event)

    return note


def _stops(record: oversight.Command | None, number: int) -> Mapping[str, int | None]:
    """Return the orders to stop that are older than the command, for a worker that it starts.

    A worker that starts late, or in the place of a dead one, is to follow the others.
    """
    return {} if record is None else record.begin_worker(number)


def shares(limit: int | None, workers: int) -> list[int | None]:
    """Divide a limit as evenly as possible; leave out workers that could handle no row."""
    if limit is None:
        return [None] * workers
    each, rest = divmod(limit, workers)
    shares: list[int | None] = [each + (number < rest) for number in range(workers)]
    return [share for share in shares if share] or [0]


def watch(
    processors: Sequence[BatchProcessor[Any]],
    plan: Plan,
    *,
    workers: int = 1,
    stop: Stop,
    tell: Callable[[int | None, str | None, News], None],
    on_counts: OnCounts | None = None,
    health: Health | None = None,
    may_supervise: bool = False,
) -> bool:
    """Watch in so many workers; return whether one had a processor to run until the end.

    ``max_rows`` of the plan is for all workers together. ``tell`` gets the worker's number, the
    processor's name, and what happened. With one worker, the watch is in this process, or in a
    child as in ``run()``, and its number is ``None``. A child that dies is started again.
    ``on_counts``: as for ``run()``. Raises as ``run()`` does.
    """
    check_workers(workers)
    health = health or Health([processor.name for processor in processors], stop)
    with oversight.command("watch", [processor.name for processor in processors]) as record:
        if workers == 1 and not (may_supervise and _can_be_killed(processors)):
            with _monitored(health):
                return Watch(processors, plan, stop, partial(tell, None), record).run()
        return _watch_workers(
            processors,
            plan,
            workers=workers,
            tell=tell,
            record=record,
            health=health,
            on_counts=on_counts,
        )


def _watch_workers(
    processors: Sequence[BatchProcessor[Any]],
    plan: Plan,
    *,
    workers: int,
    tell: Callable[[int | None, str | None, News], None],
    record: oversight.Command | None,
    health: Health,
    on_counts: OnCounts | None,
) -> bool:
    """Watch in so many children."""
    by_name = {processor.name: processor for processor in processors}
    names = list(by_name)
    sends_counts = are_counts_wanted(on_counts)
    rows_left = shares(plan.max_rows, workers)

    def work(number: int) -> partial[bool]:
        own = replace(plan, max_rows=rows_left[number - 1])
        shown = label(names, number, workers)
        stops = _stops(record, number)
        return partial(_watch, names, own, shown=shown, stops=stops, sends_counts=sends_counts)

    def tell_or_count(number: int, name: str | None, event: News) -> None:
        if isinstance(event, Counted):
            if name in by_name:
                counted(by_name[name], event.tally, on_counts)
        elif not isinstance(event, str):
            tell(number if workers > 1 else None, name, event)
        elif (left := rows_left[number - 1]) is not None:
            # A row was tried: a worker that takes this one's place has one row less to try.
            rows_left[number - 1] = left - 1

    return Supervisor(
        len(rows_left),
        work,
        stop=health.stop,
        tell=_recording(record, tell_or_count),
        restart=BACKOFF,
        deadline=plan.deadline,
        limit=_longest(processors),
        observe=health.seen,
    ).run()


def _longest(processors: Sequence[BatchProcessor[Any]]) -> float | None:
    """Return the longest ``handler_timeout``; ``None``: one of the processors has none."""
    limits = [processor._time_limit for processor in processors]
    return None if None in limits else max(filter(None, limits), default=None)


def _watch(
    names: Sequence[str],
    plan: Plan,
    stop: Stop,
    send: Send,
    *,
    shown: str,
    stops: Mapping[str, int | None],
    sends_counts: bool,
) -> bool:
    """Watch, in a child process; send each event, and the rows only if they are counted."""

    def tell(name: str, event: Event) -> None:
        if plan.max_rows is not None or not isinstance(event, str):
            send(name, event)

    with (
        as_worker(shown),
        counts_sent(send, is_share=False) if sends_counts else nullcontext(),
        oversight.worker(names, send, stops) as record,
    ):
        try:
            return Watch(registry.get(names), plan, stop, tell, record).run()
        finally:
            observers.flush()


def check_workers(workers: int) -> None:
    """Raise ``InvalidOption`` unless this number of processes can be started."""
    if not 1 <= workers <= MOST_WORKERS:
        raise InvalidOption(
            f"expected workers to be processes from 1 to {MOST_WORKERS}, got {workers!r}."
        )
