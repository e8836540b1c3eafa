"""The command's output: reports to stdout, failures and the bar to stderr.

Without a terminal, a run with nothing to do prints nothing, because cron mails any output.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any

from django.core.management.base import OutputWrapper

from dcl_processor import backlog, registry
from dcl_processor.diagnosis import Trouble, describe
from dcl_processor.errors import printable, traceback_text
from dcl_processor.processes.console_log import logs_to_stderr
from dcl_processor.processes.graceful_stop import Stop
from dcl_processor.processor import BatchProcessor
from dcl_processor.report import DryRun, Failure, Report
from dcl_processor.signals import OnRow

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
        # If so, each failure is on stderr already.
        self._logged = logs_to_stderr()
        #: Streams that could not be written to.
        self.lost: list[OutputWrapper] = []

    @property
    def has_bar(self) -> bool:
        """Whether a terminal can show a bar, and rich is installed to draw it."""
        can_draw = self._stderr.isatty() and os.environ.get("TERM") != "dumb"
        return self._verbosity > 0 and can_draw and find_spec("rich") is not None

    @contextmanager
    def watching(
        self, processor: BatchProcessor[Any], stop: Stop, *, using: str | None, limit: int | None
    ) -> Iterator[OnRow | None]:
        """Show a bar, if there is one, while the processor runs; yield what counts a row."""
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
        # A buffered stream may be in the middle of a write, and is not reentrant. The bar shows
        # the same message.
        if self._verbosity > 0 and self._stderr.isatty() and not self.has_bar:
            os.write(self._stderr.fileno(), b"finishing the row at hand\n")

    def report(self, report: Report, copies: Sequence[Outcome] = ()) -> None:
        """Write what a run did, which rows failed, and which workers were lost."""
        self._lost(report.name, copies)
        self._failures(report)
        if report.error is not None:
            self.trouble(report.name, Trouble.of_resource(report.error))
        if self._json:
            self._document(_document(report, copies))
        elif self._verbosity > 0 and (self._terminal or report.did_something):
            self._write(self._stdout, f"{report}{_shares(copies)}")

    def dry_run(self, found: DryRun) -> None:
        """Write what a run would do."""
        if self._json:
            self._document(found.as_dict())
        elif self._verbosity > 0:
            self._write(self._stdout, f"{found}")

    def broke(self, name: str, trouble: Trouble) -> None:
        """Write why a run did not complete, and what it did until then."""
        self.trouble(name, trouble)
        if trouble.report is not None:
            self._failures(trouble.report)
        if self._json:
            self._document({"name": name, **_broken_document(trouble)})
        elif trouble.report is not None and self._verbosity > 0:
            self._write(self._stdout, f"{trouble.report}")

    def watched(self, report: Report, copy: int | None) -> None:
        """Write what a run of a watch did; ``copy``: the worker's number, if there are several."""
        self._failures(report)
        if self._json:
            self._document(_of_copy(report.as_dict(), copy))
        elif self._verbosity > 0:
            line = f"{report}" if copy is None else f"{report} (copy {copy})"
            self._write(self._stdout, line)

    def watch_broke(self, who: str, trouble: Trouble, name: str | None, copy: int | None) -> None:
        """Write why a run of a watch could not be made, or why a worker is gone."""
        if not self._logged:
            self.trouble(who, trouble)
        if self._json:
            document = {"name": name, "ok": False, "error": trouble.sentence}
            self._document(_of_copy(document, copy))

    def goes_on(self, who: str, sentence: str) -> None:
        """Write that a processor can be run again."""
        if not self._logged:
            self.trouble(who, Trouble(sentence))

    def detail(self, line: str) -> None:
        """Write a line that is shown from ``--verbosity 2`` on."""
        if self._verbosity >= 2 and not self._json:
            self._write(self._stdout, line)

    def trouble(self, name: str, trouble: Trouble) -> None:
        """Write why there is no report."""
        self._write(self._stderr, f"{name}: {trouble.sentence}")
        if self._tracebacks and trouble.traceback:
            self._write_traceback(trouble.traceback)

    def left_out(self, apps: Sequence[registry.Broken]) -> None:
        """Write which apps' processors cannot be run."""
        for each in apps:
            self._write(self._stderr, str(each))
            if self._tracebacks:
                self._write_traceback(traceback_text(each.error))

    def close(self) -> None:
        """Leave nothing in the streams that Python would fail to write at exit."""
        for stream in (self._stdout, self._stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                _discard(stream)

    def _write(self, stream: OutputWrapper, text: str, **style: Any) -> None:
        """Write a line, at once; a stream that cannot be written to does not end the run."""
        try:
            stream.write(text, **style)
            stream.flush()
        except (OSError, ValueError) as error:  # a disk that is full, a reader that has gone
            if stream not in self.lost:
                self.lost.append(stream)
                self._say_lost(stream, error)

    def _say_lost(self, stream: OutputWrapper, error: Exception) -> None:
        name, other = (
            ("stdout", self._stderr) if stream is self._stdout else ("stderr", self._stdout)
        )
        sentence = f"{name} cannot be written to, but the run continues: {describe(error)}"
        if other is self._stdout and self._json:
            sentence = json.dumps({"ok": False, "error": sentence})
        with suppress(OSError, ValueError):
            other.write(sentence)
            other.flush()

    def _write_traceback(self, text: str) -> None:
        for line in text.splitlines():
            shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
            self._write(self._stderr, shown, style_func=str)

    def _document(self, document: Any) -> None:
        self._write(self._stdout, json.dumps(document))

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
            self._document(documents)
            return
        width = max((len(processor.name) for processor, _ in backlogs), default=0)
        self._write(self._stdout, "pending  processor")
        for processor, number in backlogs:
            pending = "?" if number is None else backlog.words(number)
            about = (processor.__doc__ or "").strip().partition("\n")[0]
            line = f"{pending:>7}  {processor.name:<{width}}  {about}"
            self._write(self._stdout, line.rstrip())

    def _lost(self, name: str, copies: Sequence[Outcome]) -> None:
        numbers: dict[str, list[str]] = {}
        for number, copy in enumerate(copies, start=1):
            if isinstance(copy, Trouble):
                numbers.setdefault(copy.sentence, []).append(str(number))
        troubles = {copy.sentence: copy for copy in copies if isinstance(copy, Trouble)}
        for sentence, trouble in troubles.items():
            which = numbers[sentence]
            # A trouble of all workers is written once, not once for each.
            whose = "" if len(which) == len(copies) else f", copy {' and '.join(which)}"
            self.trouble(f"{name}{whose}", trouble)

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
        if not failure.is_final:
            if self._verbosity > 0 and not self._json:
                self._write(self._stdout, line)
            return
        self._write(self._stderr, line)
        if self._tracebacks:
            self._write_traceback(failure.traceback)


def _shares(copies: Sequence[Outcome]) -> str:
    if len(copies) < 2:
        return ""
    own = [copy.report if isinstance(copy, Trouble) else copy for copy in copies]
    shares = ["?" if report is None else str(report.processed) for report in own]
    return f" ({len(copies)} copies: {', '.join(shares)})"


def _broken_document(trouble: Trouble) -> dict[str, Any]:
    done = {} if trouble.report is None else trouble.report.as_dict()
    return {**done, "ok": False, "error": trouble.sentence}


def _of_copy(document: dict[str, Any], copy: int | None) -> dict[str, Any]:
    return document if copy is None else {**document, "copy": copy}


def _discard(stream: OutputWrapper) -> None:
    with suppress(OSError, ValueError, AttributeError):
        # Text that is still in its buffer would raise again when Python exits.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def _document(report: Report, copies: Sequence[Outcome]) -> dict[str, Any]:
    if not copies:
        return report.as_dict()
    complete = all(isinstance(copy, Report) for copy in copies)
    documents = [
        copy.as_dict() if isinstance(copy, Report) else _broken_document(copy) for copy in copies
    ]
    return {**report.as_dict(), "ok": report.ok and complete, "copies": documents}
