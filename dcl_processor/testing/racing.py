"""Three workers that meet at one row: a mistake shows each time and not once a month."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from django.db import connections
from django.db.models import Q

from dcl_processor.exceptions import Unsupported
from dcl_processor.operator.backlog import question_of
from dcl_processor.processor import BatchProcessor
from dcl_processor.report.interrupts import Interruption
from dcl_processor.report.observer import RowEvent, RunEvent
from dcl_processor.report.report import COUNTS, Report
from dcl_processor.testing.settling import HandlerAsserted, watched

#: Seconds: how long the first worker stays in its handler for the second one, which may wait for a
#: lock of it, and how long a race may take.
PATIENCE, TIMEOUT = 3.0, 60.0

_READS = re.compile(r"\s*\(?(SELECT|WITH)\b(?!.*\b(UPDATE|SHARE)\b)", re.DOTALL)


def race(
    processor: BatchProcessor[Any], *, filter: Q | None = None, using: str | None = None
) -> tuple[Report, ...]:
    """Run three workers against each other; none may handle a row that another one has or had.

    All read their candidates first. Then the first worker handles a row; the second one comes to
    it while it is locked, and runs to its end; the third one comes when the first has ended, with
    its candidates from before. ``filter`` and ``using`` are those of ``run()``.

    Returns the workers' reports. Raises ``AssertionError`` if a handler is about to be called for
    another worker's row. A handler's ``AssertionError``, and any error of ``run()``, is raised
    unchanged. Raises ``Unsupported`` inside ``TestCase`` and on a database without row locks, where
    a race would prove nothing.
    """
    connection = connections[question_of(processor, using).using]
    named = f"race({processor.name}): expected"
    if not connection.features.has_select_for_update:
        raise Unsupported(
            f"{named} a database that locks single rows, such as PostgreSQL or MariaDB, got "
            f"{connection.display_name}, which has one lock for all rows, so it would test "
            "nothing; run it on the database system of production."
        )
    if connection.in_atomic_block:
        raise Unsupported(
            f"{named} rows that are committed, got a test inside TestCase or atomic(), whose rows "
            "no other session sees, so it would test nothing; use TransactionTestCase, or "
            "pytest-django's django_db(transaction=True)."
        )
    course = _Course()
    workers = [_Worker(number, course, processor) for number in (1, 2, 3)]
    given = filter, connection.alias
    threads = [threading.Thread(target=each.work, args=given, daemon=True) for each in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    course.stop.set()
    return _judged(processor.name, course, workers)


def _judged(name: str, course: _Course, workers: Sequence[_Worker]) -> tuple[Report, ...]:
    if course.double:
        raise AssertionError(
            f"{name}: expected each row to be handled by one worker, got {course.double}."
        )
    for worker in workers:
        if worker.error is not None:
            raise worker.error
    reports = tuple(worker.report for worker in workers if worker.report is not None)
    if len(reports) < len(workers):
        words = f"the race to end within {TIMEOUT:g} s, got one that did not"
        raise AssertionError(f"{name}: expected {words}.")
    if not any(getattr(report, count) for report in reports for count in COUNTS):
        raise AssertionError(
            f"{name}: expected pending rows to race for, got none, so nothing was tested; create "
            "rows before the race, and commit them."
        )
    return reports


class _Double(Interruption):
    """Ends a worker that was about to handle another worker's row again."""


class _Course:
    """What the workers of one race, 1 to 3, know of each other."""

    def __init__(self) -> None:
        self.stop, self.double = threading.Event(), ""
        self.has_read, self.has_ended = ([threading.Event() for _ in range(4)] for _ in range(2))
        self.is_at_work, self._lock = threading.Event(), threading.Lock()
        #: The worker that each row is with, and whether it has processed the row.
        self._had: dict[Any, tuple[int, bool]] = {}

    def stand(self, number: int) -> None:
        """Let a worker wait before its first lock."""
        self.has_read[number].set()
        for event in (self.has_read[2:], [self.is_at_work], [self.has_ended[1]])[number - 1]:
            event.wait(TIMEOUT)

    def begin(self, pks: Sequence[Any], number: int) -> None:
        """Note a handler call; end the race if another worker has, or had, the row."""
        with self._lock:
            for pk in pks:
                other, is_processed = self._had.setdefault(pk, (number, False))
                if other != number:
                    words = "had finished" if is_processed else "had not finished"
                    self.double = f"row {pk} handled by worker {other}, which {words} it, and again"
                    self.stop.set()
                    raise _Double
        if number == 1 and not self.is_at_work.is_set():
            self.is_at_work.set()
            self.has_ended[2].wait(PATIENCE)

    def end(self, pk: Any, number: int, *, is_processed: bool) -> None:
        """Note that a worker has processed a row, or leaves it to others."""
        with self._lock:
            if is_processed:
                self._had[pk] = number, True
            elif self._had.get(pk) == (number, False):
                del self._had[pk]


class _Worker:
    """One worker, in a thread and with a connection of its own; it observes its run."""

    def __init__(self, number: int, course: _Course, processor: BatchProcessor[Any]) -> None:
        self._number, self._course = number, course
        self._twin = watched(processor, self._handling)
        self._twin.observers = (*processor.observers, self)
        self.report: Report | None = None
        self.error: BaseException | None = None

    def work(self, filter: Q | None, using: str) -> None:
        """Run the processor."""
        try:
            # A new connection's own statements are no part of the race.
            connections[using].ensure_connection()
            with connections[using].execute_wrapper(self._statement):
                given: dict[str, Any] = {"filter": filter, "using": using, "wait_for_locked": 0}
                self.report = self._twin.run(**given, stop=self._course.stop)
        except BaseException as error:  # noqa: BLE001  # raised in the test's own thread
            self.error = error.error if isinstance(error, HandlerAsserted) else error
            self._course.stop.set()
        finally:
            connections.close_all()
            self._course.has_read[self._number].set()
            self._course.has_ended[self._number].set()
            if self._number == 1:
                self._course.is_at_work.set()

    def run(self, event: RunEvent) -> None:
        """Take no note of a run."""

    def row(self, event: RowEvent) -> None:
        """Take note of a row's end."""
        if event.kind == "ended":
            is_processed = event.outcome == "processed"
            self._course.end(event.pk, self._number, is_processed=is_processed)

    def _statement(self, execute: Any, sql: str, *more: Any) -> Any:
        if not (self._course.has_read[self._number].is_set() or _READS.match(sql)):
            self._course.stand(self._number)
        return execute(sql, *more)

    @contextmanager
    def _handling(self, pks: Sequence[Any]) -> Iterator[None]:
        # Before the handler: the test does not need the effect of a second call.
        self._course.begin(pks, self._number)
        try:
            yield
        except BaseException:
            for pk in pks:
                self._course.end(pk, self._number, is_processed=False)
            raise
