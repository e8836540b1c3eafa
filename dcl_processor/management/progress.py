"""The live bar on a terminal, drawn by rich; imported only if rich is installed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from dcl_processor.insights.answer import Answer
from dcl_processor.operator.times import span
from dcl_processor.signals import OnRow

#: Seconds over which the rate is measured.
WINDOW = 60.0


class Figures(ProgressColumn):
    """Rows so far, of how many, failures, rows per second and the remaining time."""

    def __init__(self, stopping: Callable[[], bool]) -> None:
        super().__init__(Column(no_wrap=True))
        self.stopping = stopping

    def render(self, task: Task) -> Text:
        """Return the current figures; rich calls this ten times a second."""
        figures = Text(self._position(task))
        if failed := task.fields["failed"]:
            figures.append(f", {failed:,} failed", style="red")
        if speed := task.speed:
            is_fast = speed >= 1
            figures.append(f", {speed:,.0f} rows/s" if is_fast else f", {60 * speed:.2g} rows/min")
        if self.stopping():
            figures.append(", finishing the current row", style="yellow")
        elif left := task.time_remaining:
            figures.append(f", about {span(left)} left")
        return figures

    @staticmethod
    def _position(task: Task) -> str:
        done, total = int(task.completed), task.total
        if total is None:
            return f"{done:,} rows"
        return f"{done:,} of {int(total):,} ({int(task.percentage)} %)"


@contextmanager
def bar(
    name: str, pending: Answer[int], *, stopping: Callable[[], bool], color: bool
) -> Iterator[OnRow]:
    """Show a bar on standard error until the block ends; yield what counts one row's outcome.

    It moves to and fro where it is not known how many rows there are.
    """
    drawing = Progress(
        TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
        BarColumn(
            bar_width=None,
            complete_style="green",
            pulse_style="green",
            table_column=Column(ratio=1, min_width=8),
        ),
        Figures(stopping),
        console=Console(file=sys.stderr, no_color=None if color else True),
        # The bar disappears at the end; the report stays on the screen.
        transient=True,
        expand=True,
        # A handler's prints go above the bar, unless stdout is a file.
        redirect_stdout=sys.stdout.isatty(),
        speed_estimate_period=WINDOW,
    )
    added = drawing.add_task(name, total=pending.value, failed=0)
    (task,) = drawing.tasks

    def count(outcome: str) -> None:
        failed = task.fields["failed"] + (outcome == "failed")
        drawing.update(added, advance=1, failed=failed)
        if task.total is not None and task.completed > task.total:
            task.total = None  # more rows have come

    with drawing:
        yield count
