"""The signals that a run sends, for a progress bar, or code of the project.

Each is sent in the run's thread; ``sender`` is the processor's class, and each has ``processor``.
A receiver that raises is logged by Django, and costs no row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from django.dispatch import Signal

from dcl_processor.report import observer
from dcl_processor.report.observer import RowEvent, RunEvent

#: Sent when a run begins, before it looks for rows: ``run_id``.
run_started = Signal()

#: Sent before each call of a handler, for each row that it gets: ``pk``; ``attempt``: its number,
#: if a ``retry`` counts it.
row_started = Signal()

#: Sent after each row for which a handler was called, once its transaction has ended: ``pk``;
#: ``outcome``: "processed", "failed", "discarded" or "snoozed"; ``attempt``; ``duration``: seconds
#: that the handler took; with ``process_batch()``, that of the call.
row_finished = Signal()

#: Sent at the end of each run, except a run that raises: ``report``.
run_finished = Signal()

#: Takes the outcome of one row.
OnRow = Callable[[str], None]


class Signals:
    """The observer that sends them."""

    def run(self, event: RunEvent) -> None:
        kind = type(event.processor)
        if event.kind == "started":
            run_started.send_robust(kind, processor=event.processor, run_id=event.run_id)
        elif event.report is not None and event.error is None:
            run_finished.send_robust(kind, processor=event.processor, report=event.report)

    def row(self, event: RowEvent) -> None:
        known = {"processor": event.processor, "pk": event.pk, "attempt": event.attempt}
        kind = type(event.processor)
        if event.kind == "started":
            row_started.send_robust(kind, **known)
        elif event.outcome != "lease_lost":
            known |= {"outcome": event.outcome, "duration": event.duration}
            row_finished.send_robust(kind, **known)


def of_run(_: Any) -> Signals | None:
    """Return the observer of a run, if any signal has a receiver when it begins."""
    sent = (run_started, row_started, row_finished, run_finished)
    return Signals() if any(each.receivers for each in sent) else None


observer.observers_installed.append(of_run)


@contextmanager
def row_callback(processor: Any, on_row: OnRow | None) -> Iterator[None]:
    """Call ``on_row`` with the outcome of each row that the processor finishes in the block."""

    def receive(outcome: str, **sent: Any) -> None:
        # A handler may run another processor of the same class.
        if on_row is not None and sent["processor"] is processor:
            on_row(outcome)

    if on_row is not None:
        row_finished.connect(receive, sender=type(processor))
    try:
        yield
    finally:
        row_finished.disconnect(receive, sender=type(processor))
