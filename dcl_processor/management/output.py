"""The command's output: reports and answers to stdout, failures and the bar to stderr.

Without a terminal, a run with nothing to do prints nothing, because cron mails any output.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any

from django.core.management.base import OutputWrapper

from dcl_processor.operator import registry
from dcl_processor.operator.diagnosis import Trouble, describe
from dcl_processor.options import worker
from dcl_processor.processor import BatchProcessor
from dcl_processor.report.dry_run import DryRun
from dcl_processor.report.errors import printable, shown_traceback, traceback_text
from dcl_processor.report.report import Failure, Report
from dcl_processor.workers.visible import logs_to_stderr, operations


class Output:
    """One command's output; that of one of several workers has its number."""

    def __init__(
        self,
        stdout: OutputWrapper,
        stderr: OutputWrapper,
        *,
        as_json: bool = False,
        verbosity: int = 1,
        tracebacks: bool = False,
        color: bool = True,
    ) -> None:
        self._stdout = stdout
        self._stderr = stderr
        #: Whether stdout gets only JSON.
        self.as_json = as_json
        self.verbosity = verbosity
        self._tracebacks = tracebacks or verbosity >= 2
        self._color = color
        self._terminal = stdout.isatty() or stderr.isatty()
        # If so, each failure is on stderr already.
        self._logged = logs_to_stderr()
        #: Streams that could not be written to.
        self.lost: list[OutputWrapper] = []

    # --- runs

    def report(self, report: Report, *, always: bool = False) -> None:
        """Write what a run did (``always``: also if nothing), and failed rows."""
        if report.error is not None:
            self.trouble(report.name, Trouble.of_resource(report.error))
        self._failures(report)
        if self.as_json:
            self.document(report.as_dict())
        elif always or self._terminal or report.did_something:
            self._line(report)

    def broke(self, name: str, trouble: Trouble) -> None:
        """Write why a run did not complete, and what it did until then."""
        self.trouble(name, trouble)
        report = trouble.report
        if self.as_json:
            done = {} if report is None else report.as_dict()
            self.document({"name": name, **done, "ok": False, "error": trouble.sentence})
        if report is not None:
            self._failures(report)
            self._line(report)

    def dry_run(self, found: DryRun) -> None:
        """Write what a run would do."""
        if self.as_json:
            self.document(found.as_dict())
        elif self.verbosity > 0:
            self._write(self._stdout, str(found))

    def _line(self, report: Report) -> None:
        if self.verbosity > 0 and not self.as_json:
            stale = f"; {report.stale} already done by another worker" if report.stale else ""
            number = f" (worker {worker.number})" if worker.number else ""
            self._write(self._stdout, f"{report}{stale if self.verbosity > 1 else ''}{number}")

    def _failures(self, report: Report) -> None:
        if self._logged:
            return  # each failure was logged to stderr when it happened, with its traceback
        for failure in report.failures:
            self._failure(report.name, failure)
        if (unnamed := report.failed - len(report.failures)) > 0:
            self._write(self._stderr, f"{report.name}: {unnamed} more rows failed")

    def _failure(self, name: str, failure: Failure) -> None:
        """Write a row that failed for good to stderr, and a row to be retried to stdout."""
        line = f"{name}: row {printable(str(failure.pk))} failed{failure.attempts}: "
        line += describe(failure.error)
        if failure.is_final:
            self._write(self._stderr, line)
            self._traceback(failure.traceback)
        elif self.verbosity > 0 and not self.as_json:
            self._write(self._stdout, line)

    @contextmanager
    def bar(self, processor: BatchProcessor[Any], **rows: Any) -> Iterator[None]:
        """Show a person at a terminal how far the run in the block is, if rich is installed.

        ``rows``: the run's ``filter``, ``using`` and ``limit``.
        """
        can_draw = self._stderr.isatty() and os.environ.get("TERM") != "dumb"
        # The number of pending rows costs a query, which is for the terminal alone.
        if not (self.verbosity > 0 and can_draw and find_spec("rich") is not None):
            yield
            return
        from dcl_processor.management import progress  # needs rich

        with progress.bar(processor, color=self._color, **rows):
            yield

    # --- the command itself

    def stopping(self, cause: str) -> None:
        """Acknowledge the first signal to a person; called in its handler."""
        if self.verbosity == 0 or not self._stderr.isatty():
            return
        # A buffered stream may be in the middle of a write, and is not reentrant.
        with suppress(OSError, ValueError):
            os.write(self._stderr.fileno(), f"{cause}: finishing the rows at hand\n".encode())

    def lifecycle(self, line: str) -> None:
        """Write a line about the command itself, which is no part of an answer."""
        if self.verbosity > 0:
            self._write(self._stderr, line, style_func=str)

    def trouble(self, name: str, trouble: Trouble) -> None:
        """Write why there is no report, or no answer, unless the log has written it to stderr."""
        if trouble.is_logged and self._logged:
            return
        number = f", worker {worker.number}" if worker.number else ""
        self._write(self._stderr, f"{name}{number}: {trouble.sentence}")
        self._traceback(trouble.traceback)

    def left_out(self, apps: Sequence[registry.Broken]) -> None:
        """Write which apps' processors cannot be run."""
        for each in apps:
            self._write(self._stderr, str(each))
            if self._tracebacks:
                self._traceback(traceback_text(each.error))

    def confirms(self, question: str) -> bool:
        """Ask on the terminal, on stderr, because stdout may have only JSON."""
        try:
            self._write(self._stderr, question, ending="", style_func=str)
            return sys.stdin.readline().strip().lower() in ("y", "yes")
        except KeyboardInterrupt:
            self._write(self._stderr, "", style_func=str)  # ends the line of the question
            raise

    # --- answers

    def answer(self, document: Any, lines: Iterable[str]) -> None:
        """Write the answer to a question, whatever the verbosity: as JSON, or else as lines."""
        self.lines([json.dumps(document)] if self.as_json else lines)

    def lines(self, texts: Iterable[str]) -> None:
        """Write the lines of an answer to stdout."""
        for text in texts:
            self._write(self._stdout, text)

    def document(self, document: dict[str, Any]) -> None:
        """Write what became of one processor to stdout as JSON."""
        number = {"worker": worker.number} if worker.number else {}
        self._write(self._stdout, json.dumps({**document, **number}))

    def close(self) -> None:
        """Leave nothing in the streams that Python would fail to write at exit."""
        for stream in (self._stdout, self._stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                with suppress(OSError, ValueError, AttributeError):
                    # Text that is still in its buffer would raise again when Python exits.
                    nowhere = os.open(os.devnull, os.O_WRONLY)
                    os.dup2(nowhere, stream.fileno())
                    os.close(nowhere)

    def _write(self, stream: OutputWrapper, text: str, **style: Any) -> None:
        """Write a line, at once; a stream that cannot be written to does not end the run."""
        try:
            stream.write(text, **style)
            stream.flush()
        except (OSError, ValueError) as error:  # a disk that is full, a reader that has gone
            if stream not in self.lost:
                self.lost.append(stream)
                name = "stdout" if stream is self._stdout else "stderr"
                said = "%s cannot be written to, but the command continues: %s"
                operations.warning(said, name, describe(error))

    def _traceback(self, text: str) -> None:
        for line in shown_traceback(text).splitlines() if self._tracebacks else ():
            self._write(self._stderr, line, style_func=str)
