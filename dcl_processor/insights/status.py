"""What waits, what is being handled, what is stuck, since when and why."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from django.db.models import F, QuerySet

from dcl_processor import backlog
from dcl_processor.candidates.question import Question
from dcl_processor.clock import DatabaseNow
from dcl_processor.diagnosis import explain
from dcl_processor.operator_states import default_age
from dcl_processor.processor import BatchProcessor

from . import rows
from .answer import Answer, Asker, How, Moment
from .failures import FailureGroup, by_kind, error_column
from .findings import NAMES, has_ledger, of_ledger
from .locks import Locked, locked
from .statements import estimated_rows

#: Seconds that each question may take.
TIMEOUT = 5.0


@dataclass(frozen=True, slots=True)
class Status:
    """The answers about one processor, by the names in ``NUMBERS``, and those of the ledger."""

    name: str
    delivery: str
    using: str | None
    answers: Mapping[str, Answer[Any]]
    #: What keeps rows from starting, as the ledger has it; empty: nothing.
    kept_back: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the status for JSON."""
        answers = {name: answer.as_dict() for name, answer in self.answers.items()}
        return {"name": self.name, "delivery": self.delivery, "database": self.using, **answers}


@dataclass(frozen=True, slots=True)
class Subject:
    """What is asked about; ``most``: the rows that are counted at most."""

    processor: BatchProcessor[Any]
    question: Question[Any]
    most: int
    doubt_after: float


def status(
    processor: BatchProcessor[Any],
    *,
    using: str | None = None,
    seconds: float = TIMEOUT,
    doubt_after: float | None = None,
    most: int | None = None,
    only: Collection[str] | None = None,
    down: dict[str, str] | None = None,
) -> Status:
    """Return what is known of a processor's rows; ``only``: some of the names in ``NUMBERS``.

    "paused" and "lost" are further names, whose answers are the ledger's; without ``only`` they are
    among the answers if the app ``dcl_processor.ledger`` is installed.

    ``seconds``: the time limit of each question. ``doubt_after``: seconds after which a claim
    counts as in doubt, default ``default_age()``. ``most``: the rows that are counted at most,
    default ``backlog.MOST``. ``down``: databases that cannot be reached, filled for further calls.
    """
    wanted = list(NUMBERS) if only is None else [name for name in NUMBERS if name in only]
    kept_by_ledger = NAMES if only is None else [name for name in NAMES if name in only]
    asks_ledger = has_ledger() if only is None else bool(kept_by_ledger)
    delivery = str(processor.delivery)
    kept: dict[str, Any] = {"answers": {}}
    if asks_ledger:
        kept = of_ledger(processor, kept_by_ledger, seconds, down)
    try:
        question = rows.question_of(processor, using)
    except Exception as error:  # noqa: BLE001  # the reason is the answer
        why = explain(error, processor, using)
        answers = {name: Answer[Any].unknown(why) for name in wanted}
        answers |= kept.pop("answers")
        return Status(processor.name, delivery, using, answers, **kept)
    asker = Asker(processor, seconds, down)
    after = default_age(processor) if doubt_after is None else doubt_after
    subject = Subject(processor, question, backlog.MOST if most is None else most, after)
    answers = {name: _answer(asker, subject, name) for name in wanted}
    answers |= kept.pop("answers")
    return Status(processor.name, delivery, question.using, answers, **kept)


def _answer(asker: Asker, subject: Subject, name: str) -> Answer[Any]:
    number = NUMBERS[name]
    question = subject.question

    def read() -> Answer[Any]:
        try:
            return number.read(subject)
        except rows.NotRecordedError as error:
            return Answer.not_recorded(str(error))

    expected = None if number.expect is None else partial(number.expect, subject)
    return asker.ask(question.using, read, expected)


def _keys(found: QuerySet[Any, Any], using: str, *, distinct: bool) -> QuerySet[Any, Any]:
    keys = found.using(using).order_by().values("pk")
    # A filter over a to-many relation gives a row once per match.
    return keys.distinct() if distinct else keys


def _count(found: rows.Rows, subject: Subject, using: str, *, distinct: bool) -> Answer[int]:
    if found is None:
        return Answer(0)
    keys = _keys(found, using, distinct=distinct)
    number = keys[: subject.most + 1].count()
    if number > subject.most:
        return Answer(subject.most, How.MORE_THAN)
    return Answer(number)


def _count_pending(find: Callable[..., rows.Rows], subject: Subject) -> Answer[int]:
    question = subject.question
    found = find(subject.processor, question)
    return _count(found, subject, question.using, distinct=not question.own_table)


def _expect_pending(find: Callable[..., rows.Rows], subject: Subject) -> Answer[int]:
    """Return how many rows the planner expects, if the database has an estimate."""
    question = subject.question
    found = find(subject.processor, question)
    if found is None:
        return Answer(0)
    number = estimated_rows(_keys(found, question.using, distinct=not question.own_table))
    if number is None:
        return Answer.not_recorded("the database has no estimate")
    return Answer(round(number), How.ESTIMATED)


def _count_rows(find: Callable[[Subject], rows.Rows], subject: Subject) -> Answer[int]:
    return _count(find(subject), subject, subject.question.using, distinct=False)


def _first(found: rows.Rows, time: Any, using: str) -> Answer[Moment]:
    """Return the earliest time of the rows; an exact ``None``: no row has one.

    By the order of the time, and not as an aggregate: beside the clock, which changes, PostgreSQL
    would compute it from all rows, and use no index.
    """
    if found is None:
        return Answer(None)
    times = found.using(using).annotate(dcl_time=time, dcl_now=DatabaseNow())
    timed = times.filter(dcl_time__isnull=False).order_by("dcl_time")
    for at, now in timed.values_list("dcl_time", "dcl_now")[:1]:
        return Answer(Moment.of(at, now))
    return Answer(None)


def _pending(_: BatchProcessor[Any], question: Question[Any]) -> QuerySet[Any, Any]:
    return question.queryset


def _next_due(subject: Subject) -> Answer[Moment]:
    found = rows.later(subject.processor, subject.question)
    retry = subject.processor.retry
    time = F((retry.next_attempt_at if retry else None) or "")
    return _first(found, time, subject.question.using)


def _oldest(subject: Subject) -> Answer[Moment]:
    since = subject.processor.pending_since
    if since is None:
        raise rows.NotRecordedError("set pending_since=…")
    found = rows.waiting(subject.processor, subject.question)
    time = F(since) if isinstance(since, str) else since
    using = subject.question.using
    answer = _first(found, time, using)
    if answer.value is None and found.using(using).order_by().exists():
        return Answer.unknown("no pending row has a value of pending_since")
    return answer


def _in_progress(subject: Subject) -> rows.Rows:
    return rows.in_progress(subject.processor, subject.question, subject.doubt_after)


def _in_doubt(subject: Subject) -> rows.Rows:
    return rows.in_doubt(subject.processor, subject.question, subject.doubt_after)


def _given_up(subject: Subject) -> rows.Rows:
    return rows.given_up(subject.processor, subject.question)


def _leased_until(subject: Subject) -> Answer[Moment]:
    lease, using = subject.processor.lease, subject.question.using
    return _first(_in_progress(subject) if lease else None, F(lease.field if lease else ""), using)


def _in_doubt_since(subject: Subject) -> Answer[Moment]:
    time = F(subject.processor.claimed_at or "")
    return _first(_in_doubt(subject), time, subject.question.using)


def _errors(subject: Subject) -> Answer[tuple[FailureGroup, ...]]:
    found = rows.with_error(subject.processor, subject.question)
    return by_kind(found.order_by(), error_column(subject.processor) or "", most=subject.most)


def _locked(subject: Subject) -> Answer[Locked]:
    question = subject.question
    keys = question.unfiltered.using(question.using).order_by("pk").values("pk")
    answer = locked(question, keys[: subject.most])
    if answer.value is None or keys[: subject.most + 1].count() <= subject.most:
        return answer
    if answer.value.rows == 0:
        return Answer.unknown(f"none of the first {subject.most:,} pending rows; there are more")
    return replace(answer, how=How.MORE_THAN)


@dataclass(frozen=True, slots=True)
class Number:
    """How an answer is read; ``expect``: how it is estimated if that takes too long."""

    read: Callable[[Subject], Answer[Any]]
    expect: Callable[[Subject], Answer[Any]] | None = None


def _number_of(find: Callable[..., rows.Rows]) -> Number:
    """Return how pending rows are counted, or estimated."""
    return Number(partial(_count_pending, find), partial(_expect_pending, find))


#: The answers of a status, each by a question of its own.
NUMBERS: Mapping[str, Number] = {
    "pending": _number_of(_pending),
    "due": _number_of(rows.due),
    "later": _number_of(rows.later),
    "next_due": Number(_next_due),
    "oldest": Number(_oldest),
    "in_progress": Number(partial(_count_rows, _in_progress)),
    "leased_until": Number(_leased_until),
    "in_doubt": Number(partial(_count_rows, _in_doubt)),
    "in_doubt_since": Number(_in_doubt_since),
    "given_up": Number(partial(_count_rows, _given_up)),
    "errors": Number(_errors),
    "locked": Number(_locked),
}
