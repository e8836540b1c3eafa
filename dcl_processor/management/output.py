"""The command's output: reports and answers to stdout, failures and the bar to stderr.

Without a terminal, a run with nothing to do prints nothing, because cron mails any output.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from importlib.util import find_spec
from typing import Any

from django.core.management.base import OutputWrapper

from dcl_processor.operator import registry
from dcl_processor.operator.diagnosis import Trouble, describe
from dcl_processor.options import worker
from dcl_processor.processor import BatchProcessor
from dcl_processor.report.errors import printable, shown_traceback, traceback_text
from dcl_processor.report.report import Report


def show_operations() -> None:
    """Show on stderr what is in no report, and not the rest, where no logging is configured."""
    logger, operations = map(logging.getLogger, ("dcl_processor", "dcl_processor.operations"))
    if not operations.hasHandlers():
        logger.addHandler(logging.NullHandler())
        handler = logging.StreamHandler()
        handler.setLevel(logging.WARNING)
        operations.addHandler(handler)


class Output:
    """One command's output; what a run of one of several workers writes has its number.

    ``as_json``: stdout gets only JSON. ``verbosity``: 0: answers and errors only; from 2 on
    tracebacks, too.
    """

    def __init__(
        self,
        stdout: OutputWrapper,
        stderr: OutputWrapper,
        *,
        as_json: bool = False,
        verbosity: int = 1,
    ) -> None:
        self._stdout, self._stderr = stdout, stderr
        self.as_json, self._verbosity = as_json, verbosity

    # --- runs

    def ran(self, report: Report) -> None:
        """Write what a run did, and failed rows."""
        self._failures(report)
        if self.as_json or self._stdout.isatty() or report.did_something:
            self.result(report.as_dict(), f"{report}{_by()}")

    def broke(self, name: str, trouble: Trouble) -> None:
        """Write why a run did not complete, and what it did until then."""
        self.trouble(name, trouble)
        report, done = trouble.report, dict[str, Any]()
        if report is not None:
            done = report.as_dict()
            self._failures(report)
        if self.as_json or report is not None:
            document = {"name": name, **done, "ok": False, "error": trouble.sentence}
            self.result(document, f"{report}{_by()}")

    def _failures(self, report: Report) -> None:
        """Write rows that failed for good to stderr, and rows to be retried to stdout."""
        for failure in report.failures:
            line = f"{report.name}: row {printable(str(failure.pk))} failed{failure.attempts}: "
            line += describe(failure.error)
            if failure.is_final:
                self.error(line, failure.traceback)
            else:
                self.note(line)

    def trouble(self, name: str, trouble: Trouble) -> None:
        """Write why a run did not complete."""
        self.error(f"{name}: {trouble.sentence}{_by()}", trouble.traceback)

    def bar(self, processor: BatchProcessor[Any], **rows: Any) -> AbstractContextManager[None]:
        """Show a person at a terminal how far the run in the block is, if rich is installed.

        ``rows``: the run's ``using`` and ``limit``.
        """
        is_watched = self._verbosity > 0 and self._stderr.isatty() and not worker.number
        # The number of pending rows costs a query, which is for the terminal alone.
        if not (is_watched and find_spec("rich")):
            return nullcontext()
        from dcl_processor.management import progress  # needs rich

        return progress.bar(processor, **rows)

    def stopping(self, cause: str) -> None:
        """Acknowledge the first signal; called in its handler."""
        # A buffered stream may be in the middle of a write, and is not reentrant.
        with suppress(OSError, ValueError):
            os.write(self._stderr.fileno(), f"{cause}: finishing the rows at hand\n".encode())

    # --- errors and answers

    def error(self, line: str, traceback: str = "") -> None:
        """Write a line to stderr; with the verbosity also the traceback, masked."""
        self._write(self._stderr, line)
        if traceback and self._verbosity > 1:
            self._write(self._stderr, shown_traceback(traceback))

    def left_out(self, apps: Sequence[registry.Broken]) -> None:
        """Write which apps' processors cannot be run."""
        for each in apps:
            self.error(str(each), traceback_text(each.error))

    def note(self, line: str) -> None:
        """Write a line to stdout that is for people, and no answer."""
        if self._verbosity > 0 and not self.as_json:
            self._write(self._stdout, line)

    def result(self, document: dict[str, Any], line: str) -> None:
        """Write what became of one processor: as JSON, or as a line for people."""
        if self.as_json:
            number = {"worker": worker.number} if worker.number else {}
            self.lines([json.dumps({**document, **number})])
        else:
            self.note(line)

    def answer(self, document: Any, lines: Iterable[str]) -> None:
        """Write the answer to a question, whatever the verbosity: as JSON, or else as lines."""
        self.lines([json.dumps(document)] if self.as_json else lines)

    def lines(self, texts: Iterable[str]) -> None:
        """Write the lines of an answer to stdout."""
        for text in texts:
            self._write(self._stdout, text)

    def _write(self, stream: OutputWrapper, text: str) -> None:
        stream.write(text)
        stream.flush()  # a reader of a pipe gets each line when it is written


def _by() -> str:
    return f" (worker {worker.number})" if worker.number else ""
