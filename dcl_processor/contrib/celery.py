"""Celery starts runs: one task for all processors, and an entry for beat's schedule.

The task carries no rows, so that one that is lost, expires or is delivered twice costs nothing.
Importing this module registers it.
"""

from __future__ import annotations

import logging
import mmap
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any

from billiard.process import current_process
from celery import shared_task
from celery.signals import worker_shutting_down
from django.conf import settings

from dcl_processor.engine import limits
from dcl_processor.exceptions import InvalidOption, ProcessorError
from dcl_processor.operator import backlog, registry
from dcl_processor.operator.actions import doubts
from dcl_processor.processor import BatchProcessor
from dcl_processor.report.errors import shown
from dcl_processor.report.log import log
from dcl_processor.report.values import expect_seconds, expect_whole_number, is_number, seconds
from dcl_processor.workers.stopping import Stop, handled_by

#: The share of its interval that a scheduled run may take, unless ``timeout`` is given.
SHARE_OF_INTERVAL = 0.9

#: Tasks that one message may ask for.
MOST_TASKS = 256

#: Parameters that an entry of the schedule passes to the task unchanged.
PARAMETERS = ("limit", "using", "wait_for_locked", "concurrency", "raise_for_failures")

# Only the Celery worker's main process receives the shutdown signal. The processes of its pool are
# forked from it, and share this page of memory with it.
_shutting_down = mmap.mmap(-1, 1)


@worker_shutting_down.connect  # type: ignore[untyped-decorator]  # celery ships no types
def _tell_the_pool(**_: Any) -> None:
    _shutting_down[0] = 1


@shared_task(bind=True, name="dcl_processor.run", throws=(ProcessorError,))  # type: ignore[untyped-decorator]  # as above
def run(
    self: Any,
    name: str,
    *,
    workers: int = 1,
    timeout: float | None = None,
    limit: int | None = None,
    using: str | None = None,
    wait_for_locked: float = 10,
    concurrency: int | None = None,
    raise_for_failures: bool = False,
) -> dict[str, Any]:
    """Run the processor of this name, and return its report as plain values.

    ``workers``: the number of tasks that share the rows; the first task sends the others if there
    are rows for them, and each task has its own report. ``timeout``: seconds after which no row
    starts, for each task from its start. ``raise_for_failures``: failed rows make the task fail,
    with ``RowsFailed``. ``limit`` is for all tasks together. The other parameters are those of
    ``BatchProcessor.run()``.

    The soft time limit, ``revoke(terminate=True)`` and a warm shutdown of the Celery worker end the
    run after the row in flight; the report's ``stopped`` is then "signal".

    Raises what ``run()`` raises, ``UnknownProcessor``, and ``InvalidOption`` for a name or database
    that the settings ``DCL_PROCESSOR_TASK_NAMES`` and ``DCL_PROCESSOR_TASK_DATABASES`` do not list.
    """
    own: dict[str, Any] = {
        "timeout": timeout,
        "limit": limit,
        "using": using,
        "wait_for_locked": wait_for_locked,
        "concurrency": concurrency,
    }
    try:
        _refuse_unless_allowed(name, using)
        (processor,) = registry.get([name])
        # Here, and not again by each of the other tasks.
        _check(workers, own, is_async=processor._is_async)
        needed = _needed(processor, workers, limit, using)
        if needed > 1:
            share = None if limit is None else limit // needed
            others = {**own, "limit": share, "raise_for_failures": raise_for_failures}
            _send_others(self, needed - 1, name, others)
            own["limit"] = None if limit is None else limit - (needed - 1) * (limit // needed)
        with polite_stop() as stop:
            report = processor.run(**own, stop=stop)
    except ProcessorError as error:
        # Celery logs an expected error (``throws``) at INFO only.
        said = shown("; ".join([str(error), *getattr(error, "__notes__", ())]))
        log(logging.ERROR, "%s", said, processor=name, using=using)
        raise
    number, sentence = doubts(processor, using)
    if number:
        log(logging.WARNING, "%s: %s", name, sentence, processor=name, row_count=number)
    if raise_for_failures:
        report.raise_for_failures()
    return report.as_dict()


def every(
    schedule: Any,
    name: str,
    *,
    workers: int = 1,
    timeout: float | timedelta | None = None,
    queue: str | None = None,
    **parameters: Any,
) -> dict[str, Any]:
    """Return an entry for ``beat_schedule`` that runs the processor of this name.

    ``schedule``: seconds, a ``timedelta``, or one of Celery's schedules, such as ``crontab()``.
    ``timeout``: seconds that a run has; by default 0.9 of the interval, and required if the
    schedule is no interval. ``queue``: the queue of the tasks, instead of the app's own. The other
    parameters are those of the task ``run``.

    A message expires if no worker has taken it by the time of the next message: they do not pile up
    while the workers are away. Raises ``InvalidOption`` for values that cannot work.
    """
    interval = _interval(schedule)
    if timeout is None and interval is None:
        raise InvalidOption(
            f"expected timeout=… with a schedule that is not a number of seconds, got {schedule!r} "
            "alone; set timeout to the seconds after which a run starts no row."
        )
    if timeout is not None:
        timeout = expect_seconds("expected timeout", timeout, above_zero=True)
    elif interval is not None:
        timeout = interval * SHARE_OF_INTERVAL
    if unknown := parameters.keys() - set(PARAMETERS):
        raise InvalidOption(
            f"expected only the parameters {', '.join(PARAMETERS)}, got "
            f"{', '.join(sorted(unknown))}."
        )
    for option, value in parameters.items():
        if isinstance(value, timedelta):  # a message cannot carry one
            parameters[option] = seconds(value)
    _check(workers, parameters, is_async=True)
    kwargs = {"workers": workers, "timeout": timeout, **parameters}
    options = {"expires": interval or timeout, **({"queue": queue} if queue else {})}
    entry = {"task": run.name, "schedule": schedule, "args": (name,)}
    return {**entry, "kwargs": kwargs, "options": options}


@contextmanager
def polite_stop() -> Iterator[Stop]:
    """Yield a ``stop=`` for a run inside a task of your own; it ends the run as in ``run``.

    In a process of the Celery worker's pool, the signals of the soft time limit and of ``revoke()``
    set it, instead of raising in the handler. Celery handles the second SIGTERM: it rolls back.
    """
    stop = _Stop()

    def asked(signum: int, _: FrameType | None) -> None:
        stop.set()
        if signum == signal.SIGTERM:
            signal.signal(signum, previous[signal.SIGTERM])  # for the second one

    # Outside the pool, such as in the worker's main process, other code handles these signals.
    is_in_pool = hasattr(signal, "SIGUSR1") and current_process().name != "MainProcess"
    with handled_by(asked, [signal.SIGUSR1, signal.SIGTERM] if is_in_pool else []) as previous:
        yield stop


class _Stop(Stop):
    def is_set(self) -> bool:
        return super().is_set() or bool(_shutting_down[0])


def _needed(
    processor: BatchProcessor[Any], workers: int, limit: int | None, using: str | None
) -> int:
    """Return how many of so many tasks have a row to handle."""
    if workers == 1:
        return 1
    given = (workers, limit, processor.max_in_flight)
    most = min(each for each in given if each is not None)
    return min(most, backlog.count(processor, using=using, most=most - 1))


def _check(workers: Any, given: Mapping[str, Any], *, is_async: bool) -> None:
    """Raise ``InvalidOption`` for values that ``run()`` would refuse."""
    expect_whole_number("expected workers", workers, of="tasks", least=1, most=MOST_TASKS)
    if (concurrency := given.get("concurrency")) is not None:
        limits.check_concurrency(concurrency, is_async=is_async)
    limits.Limits(
        limit=given.get("limit"),
        timeout=given.get("timeout"),
        wait_for_locked=given.get("wait_for_locked", 0),
        stop=None,
    )


def _send_others(task: Any, number: int, name: str, kwargs: dict[str, Any]) -> None:
    """Send further tasks to the first task's queue; they expire, because late tasks are useless."""
    came_by = task.request.delivery_info or {}
    exchange, key = came_by.get("exchange"), came_by.get("routing_key")
    # Without an exchange the key is the queue's name; Celery would use the default exchange.
    route = {"exchange": exchange, "routing_key": key} if exchange else {"queue": key}
    for _ in range(number):
        task.apply_async((name,), kwargs, expires=kwargs["timeout"], **route)


def _interval(schedule: Any) -> float | None:
    """Return the seconds between two beats, or ``None`` if the schedule depends on the calendar."""
    is_interval = is_number(schedule) or isinstance(schedule, timedelta)
    return expect_seconds("expected schedule", schedule, above_zero=True) if is_interval else None


def _refuse_unless_allowed(name: str, using: str | None) -> None:
    asked = {"DCL_PROCESSOR_TASK_NAMES": name, "DCL_PROCESSOR_TASK_DATABASES": using}
    for setting, value in asked.items():
        allowed = getattr(settings, setting, None)
        if allowed is not None and value is not None and value not in allowed:
            raise InvalidOption(
                f"expected one of the values in the setting {setting}, got {value!r}; add it to "
                "the setting if tasks may use it."
            )
