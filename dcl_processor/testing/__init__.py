"""For the tests of projects that write processors: the outcome of a row, and a race.

These are plain functions, for any test runner; with pytest they are fixtures, which need no import.
"""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, Literal, TypeVar

from django.db import connections
from django.db.models import Model, Q

from dcl_processor.exceptions import InvalidOption, Unsupported
from dcl_processor.insights.rows import show
from dcl_processor.operator.states import question_of
from dcl_processor.pending.clock import DatabaseNow
from dcl_processor.pending.question import Question
from dcl_processor.processor import BatchProcessor
from dcl_processor.report.errors import described
from dcl_processor.report.observer import RowEvent, RunEvent
from dcl_processor.report.report import COUNTS, Report

__all__ = ["assert_settles", "make_due", "race"]

M = TypeVar("M", bound=Model)
Outcome = Literal["processed", "failed", "snoozed", "discarded"]

#: Seconds: how long the first worker waits before its handler for the second one, which may itself
#: wait for a lock of it; and how long each of them starts rows.
PATIENCE, TIMEOUT = 3.0, 60.0


def assert_settles(
    processor: BatchProcessor[M],
    row: M,
    *,
    outcome: Outcome = "processed",
    resource: Any = None,
    using: str | None = None,
) -> Report:
    """Run the processor for this row alone; the row has to be processed, and to leave pending.

    ``outcome``: what the row is to come to instead. ``resource``: what the handler gets instead of
    the ``resource()``. Returns the run's report. Works inside ``TestCase`` and on every database.
    The instance is not changed: ``refresh_from_db()`` loads what was written. Raises
    ``AssertionError`` with what happened instead; the handler's own ``AssertionError`` is raised
    with its traceback as a note, and any error of ``run()`` unchanged.
    """
    _ask(processor, row, using)
    twin = copy.copy(processor)
    if resource is not None:
        vars(twin).update(resource=lambda: nullcontext(resource))
    report = twin.run(filter=Q(pk=row.pk), using=using, wait_for_locked=0)
    for failure in report.failures:
        if isinstance(failure.error, AssertionError):
            failure.error.add_note(failure.traceback)
            raise failure.error
    if getattr(report, outcome) == 1:
        return report
    error = report.failures[0].error if report.failures else report.error
    counts = [f"1 {name}" for name in COUNTS if getattr(report, name)]
    if error is not None:
        counts.append(f"{type(error).__name__}: {described(error)}")
    got = ", ".join(counts) or f"no attempt: {_reason(processor, row, using)}"
    raise AssertionError(
        f"{processor.name}: expected {row!r} (key {row.pk}) to be {outcome}, got {got}."
    ) from error


def make_due(processor: BatchProcessor[M], row: M, *, using: str | None = None) -> None:
    """Let the time come for which the row waits: that of its next attempt, or the lease's end."""
    question, retry, lease = _ask(processor, row, using), processor.retry, processor.lease
    names = [retry.next_attempt_at if retry else None, lease.field if lease else None]
    waiting = question.table.filter(pk=row.pk)
    for name in filter(None, names):
        waiting.filter(**{f"{name}__isnull": False}).update(**{name: DatabaseNow()})


def _ask(processor: BatchProcessor[M], row: M, using: str | None) -> Question[Any]:
    question = question_of(processor, using)
    if not isinstance(row, question.model):
        label = question.model._meta.label
        raise InvalidOption(f"{processor.name}: expected a row of {label}, got {row!r}.")
    return question


def _reason(processor: BatchProcessor[M], row: M, using: str | None) -> str:
    """Return why the run did not try the row, as ``manage.py processors show`` does."""
    found = show(processor, row.pk, using=using).value
    return "it is not in the database" if found is None else found.reason


# --- a race: two workers meet at each row; one has it locked, and one comes when it is finished


def race(
    processor: BatchProcessor[Any], *, filter: Q | None = None, using: str | None = None
) -> tuple[Report, Report]:
    """Run two workers against each other; neither may start a row that the other has or had.

    The first worker reads its candidates and takes a row. Before it calls the handler, the second
    worker runs to its end, and meets that row locked. Then the first one goes on with its other
    candidates, which are finished by now. ``filter`` and ``using`` are those of ``run()``.

    Returns the reports of both. Raises ``AssertionError`` if both have started a row, or if there
    was none; any error of ``run()`` is raised unchanged. Raises ``Unsupported`` inside ``TestCase``
    and on a database without row locks, where a race would prove nothing.
    """
    connection = connections[question_of(processor, using).using]
    named = f"race({processor.name}): expected"
    if not connection.features.has_select_for_update:
        raise Unsupported(
            f"{named} a database that locks single rows, such as PostgreSQL or MariaDB, got "
            f"{connection.display_name}; run it on the database system of production."
        )
    if connection.in_atomic_block:
        raise Unsupported(
            f"{named} rows that are committed, got a test inside TestCase or atomic(), whose rows "
            "no other session sees; use TransactionTestCase, or pytest-django's "
            "django_db(transaction=True)."
        )
    course = _Course(processor, filter, connection.alias)
    with ThreadPoolExecutor(2) as pool:
        begun, ended = course.first_has_a_row, course.second_has_ended
        workers = pool.submit(course.work, None, begun), pool.submit(course.work, begun, ended)
    first, second = (each.result() for each in workers)
    if course.doubles:
        raise AssertionError(
            f"{processor.name}: expected each row to be handled by one worker, got both for row "
            f"{course.doubles[0]}."
        )
    if not (first.did_something or second.did_something):
        raise AssertionError(f"{named} pending rows, got none; create and commit rows before it.")
    return first, second


class _Course:
    """A race, which observes the runs of both workers."""

    def __init__(self, processor: BatchProcessor[Any], filter: Q | None, using: str) -> None:
        self._twin = copy.copy(processor)
        self._twin.observers = (*processor.observers, self)
        self._given: dict[str, Any] = {"filter": filter, "using": using}
        self.first_has_a_row, self.second_has_ended = threading.Event(), threading.Event()
        #: The row of the first worker while that waits, and those that are processed.
        self._taken: set[Any] = set()
        #: The keys of rows that both workers have started.
        self.doubles: list[Any] = []

    def work(self, begin: threading.Event | None, end: threading.Event) -> Report:
        """Run, perhaps only after an event; let the other one happen at the end, if not before."""
        if begin is not None:
            begin.wait(TIMEOUT)
        try:
            return self._twin.run(**self._given, wait_for_locked=0, timeout=TIMEOUT)
        finally:
            end.set()
            connections.close_all()

    def run(self, event: RunEvent) -> None:
        """Take no note of a run."""

    def row(self, event: RowEvent) -> None:
        """Take note of a row; let the first worker wait at its first one."""
        if event.kind == "ended":
            if event.outcome == "processed":
                self._taken.add(event.pk)
            return
        if event.pk in self._taken:
            self.doubles.append(event.pk)
        if not self.first_has_a_row.is_set():
            self._taken.add(event.pk)
            self.first_has_a_row.set()
            self.second_has_ended.wait(PATIENCE)
            self._taken.remove(event.pk)
