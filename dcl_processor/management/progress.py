"""How far the runs of a command are, in one line on a terminal."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from django.core.management.base import OutputWrapper

from dcl_processor.pending import steady as time
from dcl_processor.report.observer import RowEvent, RunEvent, observers_installed

#: Seconds between two changes of the line.
PAUSE = 0.2

#: To the beginning of the line, and erase it.
CLEAR = "\r\x1b[K"


@dataclass(slots=True)
class Progress:
    """An observer of one run, which counts the rows that are over."""

    stream: OutputWrapper
    counts: Counter[str] = field(default_factory=Counter)
    changed: float = 0.0

    def run(self, event: RunEvent) -> None:
        """Make room for the report."""
        if event.kind == "ended":
            self._write("")

    def row(self, event: RowEvent) -> None:
        """Count a row that is over."""
        if event.outcome is None:
            return
        self.counts[event.outcome] += 1
        if time.monotonic() - self.changed >= PAUSE:
            self.changed = time.monotonic()
            counted = ", ".join(f"{number} {what}" for what, number in self.counts.items())
            self._write(f"{event.processor.name}: {counted}")

    def _write(self, text: str) -> None:
        self.stream.write(f"{CLEAR}{text}", style_func=str, ending="")
        self.stream.flush()


@contextmanager
def shown(stream: OutputWrapper) -> Iterator[None]:
    """Show how far the runs in the block are, if the stream is a terminal that can erase."""
    if not stream.isatty() or os.environ.get("TERM") == "dumb":
        yield
        return

    def of_run(_: object) -> Progress:
        return Progress(stream)

    observers_installed.append(of_run)
    try:
        yield
    finally:
        observers_installed.remove(of_run)
