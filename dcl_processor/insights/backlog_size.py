"""How many rows wait for a run: counted up to a limit, and above it as the planner estimates."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from django.db import connections
from django.db.models import Q

from dcl_processor import backlog
from dcl_processor.candidates import scan
from dcl_processor.candidates.question import Question
from dcl_processor.diagnosis import explain
from dcl_processor.processor import BatchProcessor

from . import catalog
from .answer import Answer, Asker, How
from .statements import estimated_rows

#: Seconds that each question may take: a run waits for the first ones.
SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Size:
    """A number of pending rows. ``counted``: exact, a number that there are more of, or unknown.

    ``estimate``: rows that the planner expects, ``None`` if it was not asked or has no number;
    ``basis``: what it computes the estimate from. With an equal basis it knows nothing new, however
    many rows a run has handled since.
    """

    counted: Answer[int]
    estimate: int | None = None
    basis: Any = None

    @property
    def least(self) -> int:
        """The number of rows that there are at least."""
        return (self.counted.value or 0) + (self.counted.how is How.MORE_THAN)


def size(
    processor: BatchProcessor[Any],
    *,
    filter: Q | None = None,
    using: str | None = None,
    most: int | None = None,
    seconds: float = SECONDS,
) -> Size:
    """Return how many rows are pending, in the database of the lock-free read; raises no error.

    ``filter``: as for a run. ``most``: rows that are counted at most, default ``backlog.MOST``; the
    planner is asked only if there are more, or if counting took too long. ``seconds``: the time
    limit of each of the two questions.
    """
    try:
        question = backlog.question_of(processor, filter=filter, using=using)
    except Exception as error:  # noqa: BLE001  # the run will raise it
        return Size(Answer.unknown(explain(error, processor, using)))
    asker, alias = Asker(processor, seconds), question.using
    counted = asker.ask(alias, partial(_count, question, backlog.MOST if most is None else most))
    if counted.how is How.EXACT:
        return Size(counted)
    return _beyond(asker, question, counted)


def beyond(
    processor: BatchProcessor[Any],
    counted: Answer[int],
    *,
    seconds: float,
    down: dict[str, str] | None = None,
) -> Size:
    """Return a count that is not exact with the planner's estimate beside it; raises no error.

    ``seconds``: the time limit of the question; ``down``: as for ``Asker``.
    """
    try:
        question = backlog.question_of(processor)
    except Exception:  # noqa: BLE001  # the count has the reason
        return Size(counted)
    return _beyond(Asker(processor, seconds, down), question, counted)


def _beyond(asker: Asker, question: Question[Any], counted: Answer[int]) -> Size:
    expected = asker.ask(question.using, partial(estimate, question))
    if expected.value is None:
        return Size(counted)
    return Size(counted, *expected.value)


def _count(question: Question[Any], most: int) -> Answer[int]:
    number = scan.every(question)[: most + 1].count()
    return Answer(most, How.MORE_THAN) if number > most else Answer(number)


def estimate(question: Question[Any]) -> Answer[tuple[int, Any]]:
    """Return the rows that the planner expects, and the basis of the estimate."""
    number = estimated_rows(scan.every(question))
    if number is None:
        return Answer.not_recorded("the database has no estimate")
    using = question.using
    # Every part of a plan grows with the table's file, and so with each version of a row that a run
    # writes; the share of the pending rows is that of the last ANALYZE. Of MariaDB and MySQL, which
    # do not tell when they sampled the table, the number itself has to differ.
    has_time = connections[using].vendor == "postgresql"
    basis = catalog.analyzed(using, question.model) if has_time else round(number)
    return Answer((round(number), basis))
