"""What the page shows of a processor: the answers of ``insights``, within a time limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from dcl_processor import backlog
from dcl_processor import steady as time
from dcl_processor.diagnosis import explain
from dcl_processor.insights import rows
from dcl_processor.insights.answer import Answer, Asker, How, Moment, as_utc
from dcl_processor.insights.rows import key_text
from dcl_processor.insights.status import estimate, status
from dcl_processor.management import wording
from dcl_processor.masking import shown
from dcl_processor.operator_states import default_age
from dcl_processor.processor import BatchProcessor

from . import ledger
from .pace import Expected, Pace, Point, pace

#: Seconds that a panel, and that all panels of one page, may take.
PANEL, PAGE = 0.9, 6.0

#: Seconds of a panel that are kept for the planner's estimate: a count may use up the others.
FOR_ESTIMATE = 0.1

#: Rows of a list, and characters of an error in it.
SHOWN, LONGEST = 20, 300

#: The answers of a panel, and what they are called. The first is that of the bar.
LABELS: Mapping[str, str] = {
    "pending": "Pending",
    "due": "Due now",
    "later": "Due later",
    "oldest": "Oldest pending",
    "in_progress": "In progress",
    "in_doubt": "In doubt",
    "given_up": "Given up",
}

#: Those that a person has to look at if they are not 0.
ALARMS = frozenset({"in_doubt", "given_up"})


class Budget:
    """Seconds that several questions share."""

    #: Why nothing more is asked.
    WHY = "not asked, because the time of the page was used up"

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def part(self, most: float) -> Budget:
        """Return a budget of what is left, and not more than ``most``."""
        return Budget(min(most, self.left()))

    def left(self) -> float:
        return self._end - time.monotonic()


@dataclass(frozen=True, slots=True)
class Number:
    """An answer with its label; ``is_alarm``: a person has to look at these rows."""

    key: str
    label: str
    text: str
    how: str
    at: datetime | None = None
    is_alarm: bool = False
    #: Whether it would be an alarm, and is not known.
    is_unknown: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """One processor; ``key``: its place on the page, for ids."""

    key: str
    processor: BatchProcessor[Any]
    using: str | None
    numbers: tuple[Number, ...]
    pace: Pace

    @property
    def name(self) -> str:
        return self.processor.name

    @property
    def delivery(self) -> str:
        return str(self.processor.delivery)

    @property
    def alarms(self) -> list[Number]:
        return [each for each in self.numbers if each.is_alarm]


@dataclass(frozen=True, slots=True)
class StuckRow:
    """A row of a list; ``key``: its primary key, as a form names it."""

    key: str
    text: str = ""
    at: datetime | None = None


def panel(
    key: str,
    processor: BatchProcessor[Any],
    before: Sequence[Point],
    *,
    now: float,
    budget: Budget,
    down: dict[str, str],
) -> Panel:
    """Return the panel of a processor; ``before``: the counts that were shown earlier."""
    own = budget.part(PANEL)
    pending, using = ask(processor, "pending", own.part(own.left() - FOR_ESTIMATE), down)
    expected = _expected(processor, pending, before, now=now, budget=own, down=down)
    answers = {"pending": pending}
    for name in LABELS:
        if name not in answers:
            answers[name], using = ask(processor, name, own, down)
    numbers = tuple(number(name, answers[name]) for name in LABELS)
    return Panel(key, processor, using, numbers, pace(before, now, pending, expected))


def _expected(
    processor: BatchProcessor[Any],
    pending: Answer[int],
    before: Sequence[Point],
    *,
    now: float,
    budget: Budget,
    down: dict[str, str],
) -> Expected | None:
    """Return what is known of rows that are not counted; ``None``: they are, or nothing is."""
    if pending.how is How.EXACT or budget.left() < ledger.SHORTEST:
        return None
    found = estimate(processor, seconds=budget.left(), down=down)
    if found.value is None:
        return None
    rows, as_of = found.value
    since = before[-1][0] if before else now
    gone, rate = ledger.pace(processor, since, now, within=budget.left())
    return Expected(rows, as_of, gone, rate)


def ask(
    processor: BatchProcessor[Any], name: str, budget: Budget, down: dict[str, str]
) -> tuple[Answer[Any], str | None]:
    """Return one of the answers of a status, and the database; never raises."""
    left = budget.left()
    if left < ledger.SHORTEST:
        return Answer.unknown(Budget.WHY), None
    found = status(processor, seconds=left, only=[name], down=down)
    return found.answers[name], found.using


def number(name: str, answer: Answer[Any]) -> Number:
    """Return an answer as it is shown."""
    if isinstance(answer.value, Moment):
        return Number(name, LABELS[name], wording.moment(answer), answer.how, answer.value.at)
    is_alarm = name in ALARMS and bool(answer.value)
    is_unknown = name in ALARMS and answer.value is None
    text = "none" if answer.value is None and not answer.why else wording.number(answer)
    return Number(
        name,
        LABELS[name],
        shown(text, LONGEST),
        answer.how,
        is_alarm=is_alarm,
        is_unknown=is_unknown,
    )


@dataclass(frozen=True, slots=True)
class Details:
    """What only the page of one processor shows; each answer within a second, or unknown."""

    failures: Answer[tuple[rows.FailureGroup, ...]]
    in_doubt: Answer[tuple[StuckRow, ...]]
    given_up: Answer[tuple[StuckRow, ...]]
    locked: Answer[Any]
    holders: tuple[str, ...]


def details(processor: BatchProcessor[Any], budget: Budget, down: dict[str, str]) -> Details:
    """Return the lists of one processor."""

    def asked(read: Any) -> Answer[Any]:
        left = min(budget.left(), PANEL)
        if left < ledger.SHORTEST:
            return Answer.unknown(Budget.WHY)
        try:
            question = rows.question_of(processor, None)
        except Exception as error:  # noqa: BLE001  # the reason is the answer
            return Answer.unknown(explain(error, processor))

        def answered() -> Answer[Any]:
            try:
                answer: Answer[Any] = read(question)
            except rows.NotRecordedError as error:
                return Answer.not_recorded(str(error))
            return answer

        return Asker(processor, left, down).ask(question.using, answered)

    locked, _ = ask(processor, "locked", budget.part(PANEL), down)
    return Details(
        asked(lambda question: rows.failures(processor, question, most=backlog.MOST)),
        asked(lambda question: _in_doubt(processor, question)),
        asked(lambda question: _given_up(processor, question)),
        locked,
        holders(locked),
    )


def holders(answer: Answer[Any]) -> tuple[str, ...]:
    """Return the sessions that have locked rows, in words."""
    if answer.value is None:
        return ()
    return tuple(
        shown(f"{each.rows:,} by {wording.holder(each)}", LONGEST)
        for each in answer.value.holders
        if each.rows
    )


def _in_doubt(processor: BatchProcessor[Any], question: Any) -> Answer[tuple[StuckRow, ...]]:
    found = rows.in_doubt(processor, question, default_age(processor))
    if found is None:
        return Answer(())
    read = found.values_list("pk", processor.claimed_at or "")[: SHOWN + 1]
    listed = [StuckRow(key_text(pk), at=as_utc(at)) for pk, at in read]
    return _capped(listed)


def _given_up(processor: BatchProcessor[Any], question: Any) -> Answer[tuple[StuckRow, ...]]:
    found = rows.given_up(processor, question)
    if found is None:
        return Answer(())
    column = rows.error_column(processor)
    found = found.order_by("pk")
    if column is None:
        pks = found.values_list("pk", flat=True)[: SHOWN + 1]
        return _capped([StuckRow(key_text(pk)) for pk in pks])
    read = found.values_list("pk", column)[: SHOWN + 1]
    return _capped([StuckRow(key_text(pk), shown(text or "", LONGEST)) for pk, text in read])


def _capped(listed: list[StuckRow]) -> Answer[tuple[StuckRow, ...]]:
    how = How.MORE_THAN if len(listed) > SHOWN else How.EXACT
    return Answer(tuple(listed[:SHOWN]), how)
