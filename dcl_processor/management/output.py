"""What the command says, and to whom: reports to stdout, failures and the bar to stderr.

Where there is no terminal and there was nothing to do it says nothing: cron mails any output.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from django.core.management.base import OutputWrapper

from dcl_processor.processor import BatchProcessor
from dcl_processor.report import COUNTS, Failure, Report
from dcl_processor.workers import backlog
from dcl_processor.workers.spawned import Trouble, said
from dcl_processor.workers.stopping import Stop
from dcl_processor.workers.telling import OnRow

Outcome = Report | Trouble


class Output:
    """One command's output."""

    def __init__(
        self,
        stdout: OutputWrapper,
        stderr: OutputWrapper,
        *,
        as_json: bool,
        verbosity: int,
        tracebacks: bool,
        color: bool,
    ) -> None:
        self._stdout = stdout
        self._stderr = stderr
        self._json = as_json
        self._verbosity = verbosity
        self._tracebacks = tracebacks or verbosity >= 2
        self._color = color
        self._terminal = stdout.isatty() or stderr.isatty()

    @property
    def has_bar(self) -> bool:
        """Whether there is somebody to watch a bar, and something to draw it."""
        return self._verbosity > 0 and self._stderr.isatty() and find_spec("rich") is not None

    @contextmanager
    def watching(
        self, processor: BatchProcessor[Any], stop: Stop, *, using: str | None, limit: int | None
    ) -> Iterator[OnRow | None]:
        """Show a bar while the processor runs, if there is one; yield what counts a row."""
        # The number of pending rows costs a query, which is for the bar alone.
        pending = backlog.count(processor, using=using) if self.has_bar else 0
        if not pending:
            yield None
            return
        from .progress import bar  # needs rich

        shown = pending if limit is None else min(pending, limit)
        with bar(processor.name, shown, stop.is_set, color=self._color) as count:
            yield count

    def stopping(self) -> None:
        """Acknowledge the first signal; called in its handler."""
        # A buffered stream may be in the middle of a write, and is not reentrant. The bar tells
        # it by itself.
        if self._verbosity > 0 and self._stderr.isatty() and not self.has_bar:
            os.write(self._stderr.fileno(), b"finishing the row at hand\n")

    def report(self, report: Report, copies: Sequence[Outcome] = ()) -> None:
        """Say what a run did, which rows failed, and which copies were lost."""
        self._lost(report.name, copies)
        self._failures(report)
        if report.error is not None:
            self.trouble(report.name, Trouble.of_resource(report.error))
        if self._json:
            self._stdout.write(json.dumps(_document(report, copies)))
        elif self._verbosity > 0 and (self._terminal or _did_something(report)):
            self._stdout.write(f"{report}{_shares(copies)}")

    def watched(self, report: Report, copy: int | None) -> None:
        """Say what a run of a watch did, in the copy of that number, if there are several."""
        self._failures(report)
        if self._json:
            document = report.as_dict() if copy is None else {**report.as_dict(), "copy": copy}
            self._stdout.write(json.dumps(document))
        elif self._verbosity > 0:
            self._stdout.write(f"{report}" if copy is None else f"{report} (copy {copy})")
        # Somebody may be reading it, long before the buffer is full.
        self._stdout.flush()
        self._stderr.flush()

    def trouble(self, name: str, trouble: Trouble) -> None:
        """Say why there is no report."""
        self._stderr.write(f"{name}: {trouble.sentence}")
        if self._tracebacks and trouble.traceback:
            self._stderr.write(trouble.traceback, style_func=str)

    def backlogs(self, backlogs: Sequence[tuple[BatchProcessor[Any], int | None]]) -> None:
        """List processors with their pending rows; ``None`` where these could not be counted."""
        if self._json:
            documents = [
                {
                    "name": processor.name,
                    "pending": None if number is None else min(number, backlog.MOST),
                    "capped": number is not None and number > backlog.MOST,
                }
                for processor, number in backlogs
            ]
            self._stdout.write(json.dumps(documents))
            return
        width = max((len(processor.name) for processor, _ in backlogs), default=0)
        self._stdout.write("pending  processor")
        for processor, number in backlogs:
            pending = "?" if number is None else backlog.words(number)
            about = (processor.__doc__ or "").strip().partition("\n")[0]
            self._stdout.write(f"{pending:>7}  {processor.name:<{width}}  {about}".rstrip())

    def _lost(self, name: str, copies: Sequence[Outcome]) -> None:
        numbers: dict[str, list[str]] = {}
        for number, copy in enumerate(copies, start=1):
            if isinstance(copy, Trouble):
                numbers.setdefault(copy.sentence, []).append(str(number))
        troubles = {copy.sentence: copy for copy in copies if isinstance(copy, Trouble)}
        for sentence, trouble in troubles.items():
            which = numbers[sentence]
            # What is wrong for all of them is not said once for each.
            whose = "" if len(which) == len(copies) else f", copy {' and '.join(which)}"
            self.trouble(f"{name}{whose}", trouble)

    def _failures(self, report: Report) -> None:
        for failure in report.failures:
            self._failure(report.name, failure)
        if (unnamed := report.failed - len(report.failures)) > 0:
            self._stderr.write(f"{report.name}: {unnamed} more rows failed")

    def _failure(self, name: str, failure: Failure) -> None:
        self._stderr.write(f"{name}: row {failure.pk} failed: {said(failure.error)}")
        if self._tracebacks:
            self._stderr.write(failure.traceback, style_func=str)


def _did_something(report: Report) -> bool:
    return any(getattr(report, count) for count in COUNTS if count != "stale")


def _shares(copies: Sequence[Outcome]) -> str:
    if len(copies) < 2:
        return ""
    shares = [str(copy.processed) if isinstance(copy, Report) else "?" for copy in copies]
    return f" ({len(copies)} copies: {', '.join(shares)})"


def _document(report: Report, copies: Sequence[Outcome]) -> dict[str, Any]:
    if not copies:
        return report.as_dict()
    complete = all(isinstance(copy, Report) for copy in copies)
    documents = [
        copy.as_dict() if isinstance(copy, Report) else {"ok": False, "error": copy.sentence}
        for copy in copies
    ]
    return {**report.as_dict(), "ok": report.ok and complete, "copies": documents}
