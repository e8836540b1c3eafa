"""What the page shows of a processor: the answers of ``insights`` in time, and its pace."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.core import signing
from django.db.models import F, Value

from dcl_processor.insights import rows
from dcl_processor.insights.answer import Answer, Asker, How
from dcl_processor.insights.rows import key_text
from dcl_processor.insights.status import status
from dcl_processor.management import wording
from dcl_processor.management.wording import LABELS
from dcl_processor.operator import backlog
from dcl_processor.operator.diagnosis import explain
from dcl_processor.operator.times import span, utc
from dcl_processor.pending import steady as time
from dcl_processor.processor import BatchProcessor
from dcl_processor.report.errors import shown

#: Seconds that a panel, and that all panels of one page, may take.
PANEL, PAGE = 0.9, 6.0

#: Rows of a list, and characters of an error in it.
SHOWN, LONGEST = 20, 300

#: Those that a person has to look at if they are not 0.
ALARMS = frozenset({"in_doubt", "given_up"})


#: A time in seconds since 1970, and the pending rows then.
Point = tuple[float, int]

#: Looks that a link carries for many processors, and for one alone. Servers refuse addresses of
#: more than 4,094 characters.
FEW, MANY = 2, 40

#: Seconds over which a rate is computed, and the shortest time that gives one.
WINDOW, SHORTEST_RATE = 120.0, 0.5


@dataclass(frozen=True, slots=True)
class Number:
    """An answer with its label; ``is_alarm``: a person has to look at these rows."""

    key: str
    label: str
    text: str
    at: datetime | None = None
    is_alarm: bool = False
    #: Whether it would be an alarm, and is not known.
    is_unknown: bool = False


@dataclass(frozen=True, slots=True)
class Pace:
    """``peak``: the highest count; ``points``: the oldest first; ``rate``: rows per second.

    ``peak`` is ``None`` if the number of rows is not known; ``rate`` if there is only one count.
    """

    peak: int | None
    points: tuple[Point, ...]
    rate: float | None

    @property
    def now(self) -> int:
        return self.points[-1][1] if self.points else 0

    @property
    def handled(self) -> int:
        """Return the value of the bar."""
        return (self.peak or 0) - self.now

    @property
    def words(self) -> str:
        """Return the rate, and the time that the rest takes at this rate."""
        if self.rate is None:
            return "The rate is known from the second look on."
        if self.rate == 0:
            return "The number has not changed."
        if self.rate < 0:
            return f"Falling behind by {_figure(-self.rate)}."
        return f"{_figure(self.rate)}; about {span(self.now / self.rate)} left at this rate."


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
    end: float,
    down: dict[str, str],
) -> Panel:
    """Return the panel of a processor; ``before``: the counts that were shown earlier.

    ``end``: when ``time.monotonic()`` is there, the time of the page is used up.
    """
    own = min(end, time.monotonic() + PANEL)
    found = status(processor, seconds=PANEL, only=LABELS, down=down, end=own)
    numbers = tuple(number(name, found.answers[name]) for name in LABELS)
    seen = pace(before, now, found.answers["pending"])
    return Panel(key, processor, found.using, numbers, seen)


def number(name: str, answer: Answer[Any]) -> Number:
    """Return an answer as it is shown."""
    alarms = name in ALARMS
    return Number(
        name,
        LABELS[name].capitalize(),
        shown(wording.answer(answer), LONGEST),
        getattr(answer.value, "at", None),
        is_alarm=alarms and bool(answer.value),
        is_unknown=alarms and answer.value is None,
    )


@dataclass(frozen=True, slots=True)
class Details:
    """What only the page of one processor shows; each answer within a second, or unknown."""

    failures: Answer[tuple[rows.FailureGroup, ...]]
    in_doubt: Answer[tuple[StuckRow, ...]]
    given_up: Answer[tuple[StuckRow, ...]]
    locked: Answer[Any]
    holders: list[str]


def details(processor: BatchProcessor[Any], end: float, down: dict[str, str]) -> Details:
    """Return the lists of one processor; ``end``, ``down``: as for ``panel()``."""

    def asked(read: Any) -> Answer[Any]:
        try:
            question = rows.question_of(processor, None)
        except Exception as error:  # noqa: BLE001  # the reason is the answer
            return Answer.unknown(explain(error, processor))
        asker = Asker(processor, PANEL, down, end)
        return asker.ask(question.using, lambda: read(processor, question))

    locked = status(processor, seconds=PANEL, only=["locked"], down=down, end=end)
    return Details(
        failures=asked(_failures),
        in_doubt=asked(_in_doubt),
        given_up=asked(_given_up),
        locked=locked.answers["locked"],
        holders=[shown(each, LONGEST) for each in wording.locked(locked.answers["locked"])],
    )


def _failures(processor: BatchProcessor[Any], question: Any) -> Answer[Any]:
    found = rows.in_state("given_up", processor, question).order_by("pk")
    return rows.by_kind(processor, found, most=backlog.MOST)


def _in_doubt(processor: BatchProcessor[Any], question: Any) -> Answer[tuple[StuckRow, ...]]:
    found = rows.in_state("in_doubt", processor, question)
    read = found.values_list("pk", processor.claimed_at or "pk")[: SHOWN + 1]
    return _capped([StuckRow(key_text(pk), at=utc(at)) for pk, at in read])


def _given_up(processor: BatchProcessor[Any], question: Any) -> Answer[tuple[StuckRow, ...]]:
    found = rows.in_state("given_up", processor, question).order_by("pk")
    column = processor.retry.last_error if processor.retry else None
    error: Any = Value("") if column is None else F(column)
    read = found.annotate(dcl_error=error).values_list("pk", "dcl_error")[: SHOWN + 1]
    return _capped([StuckRow(key_text(pk), shown(text or "", LONGEST)) for pk, text in read])


def _capped(listed: list[StuckRow]) -> Answer[tuple[StuckRow, ...]]:
    how = How.MORE_THAN if len(listed) > SHOWN else How.EXACT
    return Answer(tuple(listed[:SHOWN]), how)


# --- how fast the pending rows become fewer, from the counts that the page has shown before
#
# Nothing is stored: the link that refreshes the page carries the counts, so that the bar, the rate
# and the chart work without a script.


def pace(before: Sequence[Point], now: float, pending: Answer[int]) -> Pace:
    """Return the pace after another count, which may be none."""
    known = tuple(point for point in before if point[0] < now)
    if pending.value is None or pending.how is not How.EXACT:
        return Pace(None, known, None)
    points = (*known, (round(now, 1), pending.value))
    return Pace(max(count for _, count in points), points, _rate(points))


def text_of(seen: Mapping[str, Sequence[Point]], most: int) -> str:
    """Return the counts of processors for an address: of the first look, and of the latest."""
    kept = [[*points[:1], *points[1:][1 - most :]] for points in seen.values()]
    return signing.dumps(kept, salt=_salt(seen), compress=True)


def parse(text: str, names: Collection[str]) -> dict[str, tuple[Point, ...]]:
    """Return the counts by processor that an address carries; empty if it is of other names."""
    try:
        written = signing.loads(text, salt=_salt(names))
    except signing.BadSignature:
        return {}
    each = zip(names, written, strict=True)
    return {name: tuple((at, count) for at, count in points) for name, points in each}


def _salt(names: Iterable[str]) -> str:
    return f"dcl_processor.admin_page.pace.{json.dumps([*names])}"


def _rate(points: Sequence[Point]) -> float | None:
    last = points[-1]
    old = [point for point in points[:-1] if last[0] - point[0] >= SHORTEST_RATE]
    if not old:
        return None
    recent = [point for point in old if last[0] - point[0] <= WINDOW]
    first = recent[0] if recent else old[-1]
    return (first[1] - last[1]) / (last[0] - first[0])


def _figure(rate: float) -> str:
    if rate >= 1:
        return f"{rate:,.0f} rows per second"
    return f"{rate * 60:,.1f} rows per minute"
