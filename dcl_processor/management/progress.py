"""The live bar on a terminal, drawn by rich; imported only if rich is installed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dcl_processor.insights.status import waiting
from dcl_processor.processor import BatchProcessor
from dcl_processor.report.observer import RowEvent, RunEvent, observers_installed


class Bar:
    """An observer that moves the bar by one for each row that is over."""

    def __init__(self, processor: BatchProcessor[Any], pending: int | None) -> None:
        self.drawing = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[failed]} failed", style="red"),
            TimeRemainingColumn(),
            console=Console(file=sys.stderr),
            # The bar disappears at the end; the report stays on the screen.
            transient=True,
            # A handler's prints go above the bar, unless stdout is a file.
            redirect_stdout=sys.stdout.isatty(),
            speed_estimate_period=60.0,
        )
        self._failed = 0
        self._task = self.drawing.add_task(processor.name, total=pending, failed=0)

    def run(self, event: RunEvent) -> None:
        """Do nothing: the bar is there for all of the run."""

    def row(self, event: RowEvent) -> None:
        """Count a row that is over."""
        if event.kind == "ended":
            self._failed += event.outcome == "failed"
            self.drawing.update(self._task, advance=1, failed=self._failed)


@contextmanager
def bar(processor: BatchProcessor[Any], *, using: str | None, limit: int | None) -> Iterator[None]:
    """Show a bar for the processor's runs in the block on standard error, until its end."""
    pending = waiting(processor, filter=None, using=using, limit=limit).value
    shown = Bar(processor, pending)

    def of_run(running: Any) -> Bar | None:
        return shown if running is processor else None

    observers_installed.append(of_run)
    try:
        with shown.drawing:
            yield
    finally:
        observers_installed.remove(of_run)
