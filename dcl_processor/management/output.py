"""The command's output: reports to stdout, failures and the bar to stderr.

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
from django.db.models import Q

from dcl_processor.operator import registry
from dcl_processor.operator.diagnosis import Trouble, describe
from dcl_processor.workers.stopping import Stop
from dcl_processor.workers.visible import logs_to_stderr, operations
from dcl_processor.processor import BatchProcessor
from dcl_processor.report.dry_run import DryRun
from dcl_processor.report.errors import printable, shown_traceback, traceback_text
from dcl_processor.report.report import Failure, Report
from dcl_processor.signals import OnRow


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
        #: Whether stdout gets only JSON.
        self.as_json = as_json
        self._verbosity = verbosity
        self._tracebacks = tracebacks or verbosity >= 2
        self._color = color
        self._terminal = stdout.isatty() or stderr.isatty()
        # If so, each failure is on stderr already.
        self._logged = logs_to_stderr()
        self._draws_bar = False
        #: Streams that could not be written to.
        self.lost: list[OutputWrapper] = []

    @property
    def has_bar(self) -> bool:
        """Whether a person at a terminal can follow a run, and rich is installed to draw a bar."""
        can_draw = self._stderr.isatty() and os.environ.get("TERM") != "dumb"
        return self._verbosity > 0 and can_draw and find_spec("rich") is not None

    @contextmanager
    def watching(
        self,
        processor: BatchProcessor[Any],
        stop: Stop,
        *,
        filter: Q | None,
        using: str | None,
        limit: int | None,
    ) -> Iterator[OnRow | None]:
        """Show a person how far the run is while it goes on; yield what counts a row."""
        # The number of pending rows costs queries, which are for the terminal alone.
        if not self.has_bar:
            yield None
            return
        from dcl_processor.insights.status import waiting  # not for other runs

        from .progress import bar  # needs rich

        pending = waiting(processor, filter=filter, using=using, limit=limit)
        if pending.value == 0:
            yield None
            return
        with bar(processor.name, pending, stopping=stop.is_set, color=self._color) as on_row:
            self._draws_bar = True
            yield on_row
        self._draws_bar = False

    def stopping(self, stop: Stop) -> None:
        """Acknowledge the first signal to a person; called in its handler."""
        # The bar shows the same message.
        if self._verbosity == 0 or self._draws_bar or not self._stderr.isatty():
            return
        # A buffered stream may be in the middle of a write, and is not reentrant.
        with suppress(OSError, ValueError):
            os.write(self._stderr.fileno(), f"{stop.cause}: finishing the rows at hand\n".encode())

    def lifecycle(self, line: str) -> None:
        """Write a line about the command itself, which is no part of an answer."""
        if self._verbosity > 0:
            self._write(self._stderr, line, style_func=str)

    def report(self, report: Report, worker: int | None = None, *, always: bool = False) -> None:
        """Write what a run did (``always``: also if nothing), and failed rows.

        ``worker``: its number, if there are several.
        """
        if report.error is not None:
            self.trouble(_who(report.name, worker), Trouble.of_resource(report.error))
        if self.as_json or always or self._terminal or report.did_something:
            self.watched(report, worker)

    def dry_run(self, found: DryRun) -> None:
        """Write what a run would do."""
        if self.as_json:
            self.document(found.as_dict())
        elif self._verbosity > 0:
            self._write(self._stdout, f"{found}")

    def broke(self, name: str, trouble: Trouble, worker: int | None = None) -> None:
        """Write why a run did not complete, and what it did until then."""
        if not (trouble.is_logged and self._logged):
            self.trouble(_who(name, worker), trouble)
        if self.as_json:
            done = {} if trouble.report is None else trouble.report.as_dict()
            document = {"name": name, **done, "ok": False, "error": trouble.sentence}
            self.document(_of_worker(document, worker))
        if trouble.report is not None:
            self._failures(trouble.report)
            self._line(trouble.report, worker)

    def watched(self, report: Report, worker: int | None) -> None:
        """Write what a run of a watch did; ``worker``: as above."""
        self._failures(report)
        if self.as_json:
            self.document(_of_worker(report.as_dict(), worker))
        self._line(report, worker)

    def _line(self, report: Report, worker: int | None) -> None:
        if self._verbosity > 0 and not self.as_json:
            stale = f"; {report.stale} already done by another worker" if report.stale else ""
            others = stale if self._verbosity > 1 else ""
            number = "" if worker is None else f" (worker {worker})"
            self._write(self._stdout, f"{report}{others}{number}")

    def watch_broke(self, who: str, trouble: Trouble, name: str | None, worker: int | None) -> None:
        """Write why a run of a watch could not be made, or why a worker is gone."""
        if not self._logged:
            self.trouble(who, trouble)
        if self.as_json:
            document = {"name": name, "ok": False, "error": trouble.sentence}
            self.document(_of_worker(document, worker))

    def goes_on(self, who: str, sentence: str) -> None:
        """Write that a processor can be run again."""
        if not self._logged:
            self.trouble(who, Trouble(sentence))

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
                name = "stdout" if stream is self._stdout else "stderr"
                said = "%s cannot be written to, but the command continues: %s"
                operations.warning(said, name, describe(error))

    def _write_traceback(self, text: str) -> None:
        for line in shown_traceback(text).splitlines():
            self._write(self._stderr, line, style_func=str)

    def answer(self, document: Any, lines: Iterable[str]) -> None:
        """Write the answer to a question, whatever the verbosity: as JSON, or else as lines."""
        self.lines([json.dumps(document)] if self.as_json else lines)

    def lines(self, texts: Iterable[str]) -> None:
        """Write the lines of an answer to stdout."""
        for text in texts:
            self._write(self._stdout, text)

    def confirms(self, question: str) -> bool:
        """Ask on the terminal, on stderr, because stdout may have only JSON."""
        self._write(self._stderr, question, ending="", style_func=str)
        return sys.stdin.readline().strip().lower() in ("y", "yes")

    def ends_line(self) -> None:
        """End the line of a question that got no answer."""
        self._write(self._stderr, "", style_func=str)

    def document(self, document: Any) -> None:
        """Write an answer to stdout as JSON."""
        self._write(self._stdout, json.dumps(document))

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
            if self._verbosity > 0 and not self.as_json:
                self._write(self._stdout, line)
            return
        self._write(self._stderr, line)
        if self._tracebacks:
            self._write_traceback(failure.traceback)


def _who(name: str, worker: int | None) -> str:
    return name if worker is None else f"{name}, worker {worker}"


def _of_worker(document: dict[str, Any], worker: int | None) -> dict[str, Any]:
    return document if worker is None else {**document, "worker": worker}


def _discard(stream: OutputWrapper) -> None:
    with suppress(OSError, ValueError, AttributeError):
        # Text that is still in its buffer would raise again when Python exits.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
