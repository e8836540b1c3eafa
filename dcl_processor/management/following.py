"""Follows a run for a person at a terminal: corrects its figures, and writes them as lines."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from django.db import connections
from django.db.models import Q
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.progress_bar import ProgressBar
from rich.table import Column
from rich.text import Text

from dcl_processor import steady as time
from dcl_processor.insights.backlog_size import SECONDS, Size, size
from dcl_processor.processor import BatchProcessor
from dcl_processor.signals import OnRow

from .headway import Headway

#: Seconds between two corrections of an estimate, and between two lines.
CORRECTED_EACH, LINE_EACH = 30.0, 10.0

#: Shows the figures in a block, and gives what counts a row's outcome.
Show = Callable[[Headway], AbstractContextManager[OnRow]]


@contextmanager
def followed(
    processor: BatchProcessor[Any],
    show: Show,
    *,
    filter: Q | None,
    using: str | None,
    limit: int | None,
) -> Iterator[OnRow | None]:
    """Show how far a run is while the block runs it; yield what counts a row, if any is pending."""
    ask = partial(size, processor, filter=filter, using=using)
    found = ask()
    if found.counted.value == 0:
        yield None
        return
    headway = Headway(processor.name, found, limit=limit)
    with corrected(headway, ask), show(headway) as on_row:
        yield on_row


@contextmanager
def corrected(headway: Headway, ask: Callable[[], Size]) -> Iterator[None]:
    """Correct the figures by the size of the backlog while the block runs, if they are estimates.

    ``ask``: returns the size at that moment.
    """
    if not headway.is_estimated:
        yield
        return
    ended = threading.Event()
    # In a thread, which has a connection of its own: that of the run is in a row's transaction, or
    # has sent the beginning of the next one.
    thread = threading.Thread(
        target=_correct, args=(headway, ask, ended), name="dcl_processor.following", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        ended.set()
        # Each of its two questions ends with its time limit.
        thread.join(2 * SECONDS)


def _correct(headway: Headway, ask: Callable[[], Size], ended: threading.Event) -> None:
    while headway.is_estimated and not ended.wait(CORRECTED_EACH):
        try:
            headway.learn(ask())
        finally:
            # A session that waits for its next question would be one more of the server's.
            connections.close_all()


@contextmanager
def lines(
    headway: Headway,
    *,
    write: Callable[[Headway], None],
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[OnRow]:
    """Call ``write`` now and then, when a row is done."""
    last, lock = clock(), threading.Lock()

    def count(outcome: str) -> None:
        nonlocal last
        headway.count(outcome)
        with lock:
            is_time = clock() - last >= LINE_EACH
            last = clock() if is_time else last
        if is_time:
            write(headway)

    yield count


# --- the live bar on a terminal, drawn by rich; imported only if rich is installed


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
