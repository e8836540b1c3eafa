"""The live bar on a terminal, drawn by rich; imported only if rich is installed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from dcl_processor import backlog


class _Figures(ProgressColumn):
    """Rows so far, failures, rows per second and the remaining time."""

    def __init__(self, pending: int, stopping: Callable[[], bool]) -> None:
        super().__init__(Column(no_wrap=True))
        self.pending = pending
        self.stopping = stopping
        self.failed = 0

    def render(self, task: Task) -> Text:
        """Return the current figures; rich calls this ten times a second."""
        figures = Text(f"{int(task.completed)} of {backlog.words(self.pending)}")
        if self.failed:
            figures.append(f", {self.failed} failed", style="red")
        if task.speed:
            figures.append(f", {task.speed:.0f} rows/s")
        if self.stopping():
            figures.append(", finishing the current row", style="yellow")
        elif task.time_remaining:
            figures.append(f", {_clock(task.time_remaining)} left")
        return figures


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


@contextmanager
def bar(
    name: str, pending: int, stopping: Callable[[], bool], *, color: bool
) -> Iterator[Callable[[str], None]]:
    """Show a bar on standard error until the block ends; yield what counts one row's outcome."""
    figures = _Figures(pending, stopping)
    drawing = Progress(
        TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
        BarColumn(
            bar_width=None,
            complete_style="green",
            pulse_style="green",
            table_column=Column(ratio=1, min_width=8),
        ),
        figures,
        console=Console(file=sys.stderr, no_color=None if color else True),
        # The bar disappears at the end; the report stays on the screen.
        transient=True,
        expand=True,
        # A handler's prints go above the bar, unless stdout is a file.
        redirect_stdout=sys.stdout.isatty(),
    )
    row = drawing.add_task(name, total=None if pending > backlog.MOST else pending)

    def count(outcome: str) -> None:
        figures.failed += outcome == "failed"
        drawing.advance(row)

    with drawing:
        yield count
