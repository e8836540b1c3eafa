"""Workers on this machine: they share the rows of a run, or watch side by side.

One worker is this process itself, unless its handlers have a ``handler_timeout``: a process cannot
end its own handler that ignores every interrupt, so such a worker is a child, with a supervisor.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from django.core.exceptions import ImproperlyConfigured
from django.db.models import Q

from dcl_processor import backlog, observers, oversight, registry, worker
from dcl_processor.exceptions import InvalidOption, Unsupported
from dcl_processor.operator.diagnosis import Trouble
from dcl_processor.pending import steady as time
from dcl_processor.processor import BatchProcessor
from dcl_processor.report.report import Report, Stopped
from dcl_processor.signals import OnRow, row_callback
from dcl_processor.watch.watch import Counted, Plan, Watch

from .child import Send, Work
from .graceful_stop import Stop
from .health import Health
from .monitor import Monitor
from .news import Died, News
from .supervisor import Supervisor, check_children_can_see_rows
from .visible import as_worker, label

if TYPE_CHECKING:
    from dcl_processor.metrics import Samples

logger = logging.getLogger("dcl_processor")

#: Processes that one command may start: far more than a machine can use.
MOST_WORKERS = 256

#: Takes what one of several workers has counted since its last message.
OnCounts = Callable[["Samples"], None]


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
    **options: Unpack[RunOptions],
) -> list[Report | Trouble]:
    """Run the processor in so many workers; return what became of each of them.

    ``limit`` is for all workers together: it is divided before they start. ``concurrency`` is for
    each. ``on_row`` is called with each row's outcome, and ``on_counts`` with what a worker of
    several has counted, about once a second. With one worker, the run is in this process; with
    ``may_supervise`` it is in a child if the processor has a ``handler_timeout``.

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
        with Monitor(health.beat, pace=health.pace):
            needed = 1
            if workers > 1 or supervised:
                known: Any = {each: options.get(each) for each in ("limit", "filter", "using")}
                needed = backlog.workers_needed(processor, workers, **known)
            if needed == 0 or (needed == 1 and not supervised):
                with row_callback(processor, on_row):
                    report = processor.run(**options, stop=stop)
                if record is not None:
                    record.ended(processor.name, report)
                return [report]

        outcomes = Outcomes(processor.name, shares(options.get("limit"), needed), on_row)
        in_order = _run_workers(
            processor,
            outcomes,
            options,
            sends_rows=on_row is not None,
            record=record,
            health=health,
            on_counts=on_counts,
        )
        if not in_order:  # none was started
            why: Stopped = "signal" if stop.is_set() else "timeout"
            in_order = list[Report | Trouble]([Report(name=processor.name, stopped=why)])
        own = [each.report if isinstance(each, Trouble) else each for each in in_order]
        reports = [each for each in own if each is not None]
        if record is not None and reports:
            why_it_ended = min(reports, key=lambda each: each.stopped in {"drained", "busy"})
            record.ended(processor.name, why_it_ended)
    return in_order


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
    began = time.time()

    def work(number: int) -> partial[bool]:
        own: RunOptions = {**options, "limit": outcomes.limits[number - 1]}
        return partial(
            _run,
            options=own,
            began=began,
            deadline=deadline,
            sends_rows=sends_rows or own["limit"] is not None,
        )

    _supervise(
        [processor],
        work,
        outcomes.tell,
        workers=len(outcomes.limits),
        record=record,
        health=health,
        on_counts=on_counts,
        deadline=deadline,
    )
    return outcomes.in_order()


def _supervise(
    processors: Sequence[BatchProcessor[Any]],
    work: Callable[[int], partial[bool]],
    tell: Callable[[int, str | None, News], None],
    *,
    workers: int,
    record: oversight.Command | None,
    health: Health,
    on_counts: OnCounts | None,
    **options: Any,
) -> bool:
    """Let children do the work, and hand on what they send; ``options``: of the supervisor.

    ``work``: returns that of a number, which takes its processors, and how its worker is to be
    known. What they count and do goes to ``on_counts`` and ``record``, the rest to ``tell``.
    """
    names = [processor.name for processor in processors]

    def member(number: int) -> Work:
        return partial(
            work(number),
            names,
            shown=label(names, number, workers),
            sends_counts=on_counts is not None,
        )

    def take(number: int, name: str | None, event: News) -> None:
        if isinstance(event, Counted):
            if on_counts is not None:
                on_counts(event.samples)
        elif isinstance(event, oversight.Progress):
            if record is not None and name is not None:
                record.progress(number, name, event)
        else:
            if isinstance(event, Died) and record is not None:
                record.worker_died(number, event.trouble.sentence)
            tell(number, name, event)

    return Supervisor(
        workers,
        member,
        stop=health.stop,
        tell=take,
        observe=health.seen,
        pace=health.pace,
        limit=_longest(processors),
        **options,
    ).run()


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
def _member(
    names: Sequence[str], send: Send, *, shown: str, sends_counts: bool
) -> Iterator[oversight.Command | None]:
    """Be one of the workers in the block, in a child process.

    ``shown``: the worker's name for people.
    """
    counting: Any = nullcontext()
    if sends_counts:
        from dcl_processor.contrib.prometheus.exposition import Counts  # an extra
        from dcl_processor.metrics import sent

        # By the name of one; those of all are in the samples.
        counting = sent(lambda new: send(names[0], Counted(new)), Counts())
    with as_worker(shown), counting, oversight.worker(names, send) as record:
        try:
            yield record
        finally:
            observers.tell("flush")


def _run(
    names: Sequence[str],
    stop: Stop,
    send: Send,
    *,
    options: RunOptions,
    began: float,
    deadline: float | None,
    sends_rows: bool,
    **known: Any,
) -> bool:
    """Do a share of a run, in a child process; send its report, or why there is none.

    ``began``: when the command did, in seconds since 1970. ``known``: for ``_member()``.
    """
    [processor] = registry.get(names)
    if deadline is not None:
        options["timeout"] = max(0.0, deadline - time.monotonic())
    worker.began = began
    outcome: Report | Trouble
    try:
        with (
            _member(names, send, **known),
            row_callback(processor, partial(send, processor.name) if sends_rows else None),
        ):
            outcome = processor.run(**options, stop=stop)
    except Exception as error:  # noqa: BLE001  # a run that could not be made
        outcome = Trouble.of(error, processor, options.get("using"))
    send(processor.name, outcome)
    return True


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

    ``tell`` gets the worker's number, the processor's name, and what happened. With one worker, the
    watch is in this process, or in a child as in ``run()``, and its number is ``None``. A child
    that dies is started again.
    ``on_counts``: as for ``run()``. Raises as ``run()`` does.
    """
    check_workers(workers)
    health = health or Health([processor.name for processor in processors], stop)
    with oversight.command("watch", [processor.name for processor in processors]) as record:
        if workers == 1 and not (may_supervise and _can_be_killed(processors)):
            with Monitor(health.beat, pace=health.pace):
                return Watch(processors, plan, stop, partial(tell, None), record).run()
        return _supervise(
            processors,
            lambda _: partial(_watch, plan=plan),
            lambda number, name, news: tell(number if workers > 1 else None, name, news),
            workers=workers,
            record=record,
            health=health,
            on_counts=on_counts,
            restarts=True,
            deadline=plan.deadline,
        )


def _longest(processors: Sequence[BatchProcessor[Any]]) -> float | None:
    """Return the longest ``handler_timeout``; ``None``: one of the processors has none."""
    limits = [processor._time_limit for processor in processors]
    return None if None in limits else max(filter(None, limits), default=None)


def _watch(names: Sequence[str], stop: Stop, send: Send, *, plan: Plan, **known: Any) -> bool:
    """Watch, in a child process; send each event."""
    with _member(names, send, **known) as record:
        return Watch(registry.get(names), plan, stop, send, record).run()


def check_workers(workers: int) -> None:
    """Raise ``InvalidOption`` unless this number of processes can be started."""
    if not 1 <= workers <= MOST_WORKERS:
        raise InvalidOption(
            f"expected workers to be processes from 1 to {MOST_WORKERS}, got {workers!r}."
        )


# --- what became of the workers of one run, each of which may have had a successor


def shares(limit: int | None, workers: int) -> list[int | None]:
    """Divide a limit as evenly as possible."""
    if limit is None:
        return [None] * workers
    each, rest = divmod(limit, workers)
    return [each + (number < rest) for number in range(workers)]


class Outcomes:
    """The outcomes of the workers of one run; ``limits``: the rows that each may still try."""

    def __init__(self, name: str, limits: list[int | None], on_row: OnRow | None) -> None:
        self.limits = limits
        self._name = name
        self._on_row = on_row
        self._outcomes: dict[int, Report | Trouble] = {}
        self._deaths: dict[int, list[Trouble]] = {}

    def tell(self, number: int, _: str | None, event: News) -> None:
        """Take what happened to a worker."""
        match event:
            case str():
                self._count(number)
                if self._on_row is not None:
                    self._on_row(event)
            case Report() | Trouble():
                self._outcomes[number] = event
            case Died() if number not in self._outcomes:
                # A worker that dies after its report has done all of its work.
                self._deaths.setdefault(number, []).append(event.trouble)
                logger.error("%s, worker %d: %s", self._name, number, event.trouble.sentence)

    def in_order(self) -> list[Report | Trouble]:
        """Return one outcome for each worker, by number."""
        numbers = sorted({*self._outcomes, *self._deaths})
        return [self._of(number) for number in numbers]

    def _count(self, number: int) -> None:
        # A worker that takes this one's place has one row less to try.
        if left := self.limits[number - 1]:
            self.limits[number - 1] = left - 1

    def _of(self, number: int) -> Report | Trouble:
        outcome, deaths = self._outcomes.get(number), self._deaths.get(number, [])
        if not deaths:
            assert outcome is not None
            return outcome
        sentences = [trouble.sentence for trouble in deaths]
        report = outcome if isinstance(outcome, Report) else None
        if isinstance(outcome, Trouble):
            sentences.append(outcome.sentence)
            report = outcome.report
        words = "; then ".join(sentences)
        return replace(deaths[-1], sentence=words, report=report, is_logged=True)
