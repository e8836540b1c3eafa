"""Celery starts runs by one task for all processors.

The task carries no rows, so that one that is lost, expires or is delivered twice costs nothing.
Importing this module registers it.
"""

from __future__ import annotations

import mmap
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from billiard.process import current_process
from celery import shared_task
from celery.signals import worker_shutting_down
from django.conf import settings

from dcl_processor.exceptions import InvalidOption
from dcl_processor.operator import registry
from dcl_processor.workers.stopping import Stop, handled_by

# Only the Celery worker's main process receives the shutdown signal. The processes of its pool are
# forked from it, and share this page of memory with it.
_shutting_down = mmap.mmap(-1, 1)


@worker_shutting_down.connect  # type: ignore[untyped-decorator]  # celery ships no types
def _tell_the_pool(**_: Any) -> None:
    _shutting_down[0] = 1


@shared_task(name="dcl_processor.run")  # type: ignore[untyped-decorator]  # as above
def run(
    name: str,
    *,
    timeout: float | None = None,
    limit: int | None = None,
    using: str | None = None,
    wait_for_locked: float = 10,
    concurrency: int | None = None,
    raise_for_failures: bool = False,
) -> dict[str, Any]:
    """Run the processor of this name, and return its report as plain values.

    ``raise_for_failures``: failed rows make the task fail, with ``RowsFailed``. The other
    parameters are those of ``BatchProcessor.run()``.

    The soft time limit, ``revoke(terminate=True)`` and a warm shutdown of the Celery worker end the
    run after the row in flight; the report's ``stopped`` is then "signal".

    Raises what ``run()`` raises, ``UnknownProcessor``, and ``InvalidOption`` for a name or database
    that the settings ``DCL_PROCESSOR_TASK_NAMES`` and ``DCL_PROCESSOR_TASK_DATABASES`` do not list.
    """
    _refuse_unless_listed("DCL_PROCESSOR_TASK_NAMES", name)
    _refuse_unless_listed("DCL_PROCESSOR_TASK_DATABASES", using)
    (processor,) = registry.get([name])
    with polite_stop() as stop:
        report = processor.run(
            timeout=timeout,
            limit=limit,
            using=using,
            wait_for_locked=wait_for_locked,
            concurrency=concurrency,
            stop=stop,
        )
    if raise_for_failures:
        report.raise_for_failures()
    return report.as_dict()


def _refuse_unless_listed(setting: str, value: str | None) -> None:
    allowed: Any = getattr(settings, setting, None)
    if allowed is not None and value not in (None, *allowed):
        raise InvalidOption(
            f"expected one of the values in the setting {setting}, got {value!r}; add it to "
            "the setting if tasks may use it."
        )


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
    is_in_pool = current_process().name != "MainProcess"
    with handled_by(asked, [signal.SIGUSR1, signal.SIGTERM] if is_in_pool else []) as previous:
        yield stop


class _Stop(Stop):
    def is_set(self) -> bool:
        return super().is_set() or bool(_shutting_down[0])
