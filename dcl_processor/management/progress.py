"""The live bar on a terminal, drawn by rich; imported only if rich is installed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.progress_bar import ProgressBar
from rich.table import Column
from rich.text import Text

from dcl_processor.signals import OnRow

from .headway import Headway


class _Bar(BarColumn):
    """A bar that moves to and fro while it is not known how many rows there are."""

    def __init__(self, headway: Headway) -> None:
        super().__init__(
            bar_width=None,
            complete_style="green",
            pulse_style="green",
            table_column=Column(ratio=1, min_width=8),
        )
        self.headway = headway

    def render(self, task: Task) -> ProgressBar:
        """Return the current bar; rich calls this ten times a second."""
        fraction = self.headway.fraction
        # Not by Progress.update(), which takes no total back.
        task.total, task.completed = (None, 0) if fraction is None else (1, fraction)
        return super().render(task)


class _Figures(ProgressColumn):
    """Rows so far, failures, rows per second and the remaining time."""

    def __init__(self, headway: Headway, stopping: Callable[[], bool]) -> None:
        super().__init__(Column(no_wrap=True))
        self.headway = headway
        self.stopping = stopping

    def render(self, task: Task) -> Text:  # noqa: ARG002  # rich passes it
        """Return the current figures; called as often as the bar."""
        headway = self.headway
        figures = Text(headway.position())
        if headway.failed:
            figures.append(f", {headway.failed:,} failed", style="red")
        if speed := headway.speed():
            figures.append(f", {speed}")
        if self.stopping():
            figures.append(", finishing the current row", style="yellow")
        elif left := headway.left():
            figures.append(f", {left}")
        return figures


@contextmanager
def bar(headway: Headway, *, stopping: Callable[[], bool], color: bool) -> Iterator[OnRow]:
    """Show a bar on standard error until the block ends; yield what counts one row's outcome."""
    drawing = Progress(
        TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
        _Bar(headway),
        _Figures(headway, stopping),
        console=Console(file=sys.stderr, no_color=None if color else True),
        # The bar disappears at the end; the report stays on the screen.
        transient=True,
        expand=True,
        # A handler's prints go above the bar, unless stdout is a file.
        redirect_stdout=sys.stdout.isatty(),
    )
    drawing.add_task(headway.name, total=None)
    with drawing:
        yield headway.count
