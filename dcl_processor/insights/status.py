"""What waits, what is being handled, what is stuck, since when and why."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from django.db.models import F, Q, QuerySet

from dcl_processor import backlog, oversight
from dcl_processor.operator.diagnosis import explain
from dcl_processor.pending import scan
from dcl_processor.pending.clock import DatabaseNow
from dcl_processor.pending.question import Question
from dcl_processor.processor import BatchProcessor

from . import rows
from .answer import TIMEOUT, Answer, Asker, How, Moment
from .locks import Locked, locked

if TYPE_CHECKING:
    from dcl_processor.ledger import State

#: Seconds that a question may take for which a run waits.
SIZE_TIMEOUT = 1.0

#: The answers that are numbers of pending rows, and all answers, each by a question of its own.
PENDING = ("pending", "due", "later")
NUMBERS = (
    *PENDING,
    "oldest",
    "in_progress",
    "in_doubt",
    "in_doubt_since",
    "given_up",
    "errors",
    "locked",
)

#: The answers of the ledger: since when a processor is paused, and how many runs have no heartbeat
#: and no end.
OF_LEDGER = ("paused", "lost")


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


def status(
    processor: BatchProcessor[Any],
    *,
    using: str | None = None,
    seconds: float = TIMEOUT,
    doubt_after: float | None = None,
    most: int | None = None,
    only: Collection[str] | None = None,
    down: dict[str, str] | None = None,
    end: float = math.inf,
) -> Status:
    """Return what is known of a processor's rows; ``only``: some of the names in ``NUMBERS``.

    The names in ``OF_LEDGER`` are further ones; without ``only`` they are among the answers if the
    ledger is installed.

    ``seconds``: the time limit of each question. ``doubt_after``: seconds after which a claim
    counts as in doubt, at least ``default_age()``. ``most``: the rows that are counted at most,
    default ``backlog.MOST``. ``down`` and ``end``: as for an ``Asker``.
    """
    wanted = [name for name in NUMBERS if only is None or name in only]
    of_ledger = OF_LEDGER if only is None and oversight.has_ledger() else only or ()
    kept = _of_ledger(processor, [*filter(OF_LEDGER.__contains__, of_ledger)], seconds, down)
    delivery = str(processor.delivery)
    try:
        question = rows.question_of(processor, using)
    except Exception as error:  # noqa: BLE001  # the reason is the answer
        unknown = Answer[Any].unknown(explain(error, processor, using))
        answers = {**dict.fromkeys(wanted, unknown), **kept.answers}
        return replace(kept, delivery=delivery, using=using, answers=answers)
    asker = Asker(processor, seconds, down, end)
    subject = _Subject(processor, question, backlog.MOST if most is None else most, doubt_after)
    answers = {name: asker.ask(question.using, partial(subject.read, name)) for name in wanted}
    return replace(
        kept, delivery=delivery, using=question.using, answers={**answers, **kept.answers}
    )


@dataclass(frozen=True, slots=True)
class _Subject:
    """Reads the answers about a processor; ``most``: the rows that are counted at most."""

    processor: BatchProcessor[Any]
    question: Question[Any]
    most: int
    doubt_after: float | None

    def read(self, name: str) -> Answer[Any]:
        """Return the answer of this name."""
        processor = self.processor
        match name:
            case "in_doubt_since":
                found, at = self._rows("in_doubt"), processor.claimed_at
                return Answer(None) if at is None else self._first(found, F(at))
            case "oldest":
                return self._oldest()
            case "errors":
                with_error = {f"{rows.error_column(processor)}__gt": ""}
                found = self.question.table.filter(**with_error).order_by()
                return rows.by_kind(processor, found, most=self.most)
            case "locked":
                return self._locked()
            case _:
                return self._count(name)

    def _rows(self, name: str) -> QuerySet[Any, Any]:
        return rows.in_state(name, self.processor, self.question, self.doubt_after)

    def _keys(self, name: str) -> QuerySet[Any, Any]:
        found = self._rows(name).using(self.question.using)
        keys: QuerySet[Any, Any] = found.order_by().values("pk")
        # A filter over a to-many relation gives a row once per match.
        is_distinct = name in PENDING and not self.question.own_table
        return keys.distinct() if is_distinct else keys

    def _count(self, name: str) -> Answer[int]:
        number, most = self._keys(name)[: self.most + 1].count(), self.most
        return Answer(most, How.MORE_THAN) if number > most else Answer(number)

    def _first(self, found: QuerySet[Any, Any], time: Any) -> Answer[Moment]:
        """Return the earliest time of the rows; an exact ``None``: no row has one.

        By the order of the time, and not as an aggregate: beside the clock, which changes,
        PostgreSQL would compute it from all rows, and use no index.
        """
        times = found.using(self.question.using).annotate(dcl_time=time, dcl_now=DatabaseNow())
        timed = times.filter(dcl_time__isnull=False).order_by("dcl_time")
        for at, now in timed.values_list("dcl_time", "dcl_now")[:1]:
            return Answer(Moment.of(at, now))
        return Answer(None)

    def _oldest(self) -> Answer[Moment]:
        since = self.processor.pending_since
        if since is None:
            raise rows.NotRecordedError("set pending_since=…")
        found = rows.waiting(self.processor, self.question)
        answer = self._first(found, F(since) if isinstance(since, str) else since)
        if answer.value is None and found.using(self.question.using).order_by().exists():
            return Answer.unknown("no pending row has a value of pending_since")
        return answer

    def _locked(self) -> Answer[Locked]:
        question, most = self.question, self.most
        keys = question.unfiltered.using(question.using).order_by("pk").values("pk")
        answer = locked(question, keys[:most])
        if answer.value is None or keys[: most + 1].count() <= most:
            return answer
        none = "" if answer.value.rows else f"none of the first {most:,} rows"
        return replace(answer, how=How.MORE_THAN, why=none)


def _of_ledger(
    processor: BatchProcessor[Any],
    wanted: Collection[str],
    seconds: float,
    down: dict[str, str] | None,
) -> Status:
    """Return the ledger's answers alone."""
    none = Status(processor.name, "", None, {})
    if not wanted:
        return none
    if not oversight.has_ledger():
        unrecorded = Answer[Any].not_recorded(f"add {oversight.LEDGER!r} to INSTALLED_APPS")
        return replace(none, answers=dict.fromkeys(wanted, unrecorded))
    from dcl_processor.ledger import state  # has models
    from dcl_processor.ledger.models import alias

    found: Answer[State] = Asker(processor, seconds, down).ask(
        alias(), lambda: Answer(state(processor))
    )
    if found.value is None:
        return replace(none, answers=dict.fromkeys(wanted, Answer[Any].unknown(found.why)))
    pause = found.value.pause
    known: dict[str, Answer[Any]] = {
        "paused": Answer(None if pause is None else Moment(pause.since, pause.seconds)),
        "lost": Answer(found.value.lost),
    }
    answers = {name: known[name] for name in wanted}
    return replace(none, answers=answers, kept_back=found.value.sentence)


def waiting(
    processor: BatchProcessor[Any], *, filter: Q | None, using: str | None, limit: int | None
) -> Answer[int]:
    """Return how many rows a run with these parameters would find pending; raises no error."""
    try:
        keys = scan.every(rows.question_of(processor, using, filter=filter))
    except Exception as error:  # noqa: BLE001  # the run will raise it
        return Answer.unknown(explain(error, processor, using))
    asker = Asker(processor, SIZE_TIMEOUT)
    return asker.ask(keys.db, lambda: Answer(keys[:limit].count()))
