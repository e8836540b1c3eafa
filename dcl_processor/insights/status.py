"""What waits, what is being handled, what is stuck, since when and why."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from django.apps import apps
from django.db.models import F, Q, QuerySet

from dcl_processor.insights import rows
from dcl_processor.insights.answer import TIMEOUT, Answer, Asker, How, Moment
from dcl_processor.insights.pace import pace
from dcl_processor.operator import backlog
from dcl_processor.operator.states import NotRecordedError, has_attempts_left
from dcl_processor.operator.times import utc
from dcl_processor.options.options import Definition
from dcl_processor.pending.clock import DatabaseNow
from dcl_processor.pending.question import Question

#: Seconds that a question may take for which a run waits.
SIZE_TIMEOUT = 1.0

#: The answers by questions of their own, those for which the ledger is asked, and all of them.
ASKED = (*rows.STATES, "oldest")
OF_LEDGER = ("paused", "last_run", "rate", "time_left")
NUMBERS = (*ASKED, *OF_LEDGER)

#: What one line about a processor shows.
LINE = ("pending", "oldest", "in_progress", "in_doubt", "given_up", "rate", "time_left", "paused")

_LEDGER = "dcl_processor.ledger"

#: States of a processor, the worst first, by the answers that are not 0 then.
_STATES = {
    "in_doubt": "in doubt",
    "given_up": "given up",
    "?": "?",
    "paused": "paused",
    "in_progress": "in progress",
    "pending": "waiting",
}


@dataclass(frozen=True, slots=True)
class Status:
    """The answers about one processor, by the names in ``NUMBERS``.

    ``kept_back``: what keeps rows from starting, as the ledger has it; empty: nothing.
    """

    name: str
    delivery: str
    using: str | None
    answers: Mapping[str, Answer[Any]]
    kept_back: str = ""

    @property
    def states(self) -> list[str]:
        """The processor's states, the worst first; "?": an answer could not be found out."""
        there = {name for name, answer in self.answers.items() if answer.value}
        there |= {"?" for answer in self.answers.values() if answer.how is How.UNKNOWN}
        found = [words for name, words in _STATES.items() if name in there]
        return found[:-1] if found[1:] and found[-1] == "waiting" else found or ["idle"]

    @property
    def state(self) -> str:
        return ", ".join(self.states)

    def as_dict(self) -> dict[str, Any]:
        """Return the status for JSON."""
        answers = {name: answer.as_dict() for name, answer in self.answers.items()}
        known = {"name": self.name, "delivery": self.delivery, "database": self.using}
        return {**known, "state": self.state, **answers}


def troubles_first(found: Iterable[Status]) -> list[Status]:
    """Return the processors, those that need a person first."""
    order = [*_STATES.values(), "idle"]
    return sorted(found, key=lambda each: order.index(each.states[0]))


def status(
    processor: Definition[Any],
    *,
    using: str | None = None,
    seconds: float = TIMEOUT,
    doubt_after: float | None = None,
    most: int | None = None,
    only: Collection[str] | None = None,
    down: dict[str, str] | None = None,
) -> Status:
    """Return what is known of a processor's rows; ``only``: some of the names in ``NUMBERS``.

    ``seconds``: the time limit of each question. ``doubt_after``: seconds after which a claim
    counts as in doubt, at least ``default_age()``. ``most``: the rows that are counted at most.
    ``down``: as for an ``Asker``.
    """
    wanted = {*NUMBERS} if only is None else {*only}
    needed = wanted | {"pending"} if wanted & {"rate", "time_left"} else wanted
    asker = Asker(processor, using, seconds, down)
    count = partial(_count, processor, most=most or backlog.MOST, doubt_after=doubt_after)
    answers: dict[str, Answer[Any]] = {
        name: asker.ask(partial(count, name)) for name in rows.STATES if name in needed
    }
    if "oldest" in needed:
        answers["oldest"] = asker.ask(partial(_oldest, processor))
    kept_back = _of_ledger(asker, processor, answers) if wanted & {*OF_LEDGER} else ""
    answers = {name: answers[name] for name in NUMBERS if name in wanted}
    return Status(processor.name, str(processor.delivery), asker.using, answers, kept_back)


def _count(
    processor: Definition[Any],
    state: str,
    question: Question[Any],
    *,
    most: int,
    doubt_after: float | None,
) -> Answer[int]:
    """Return how many rows are in a state; ``most``: the rows that are counted at most."""
    found = rows.in_state(state, processor, question, doubt_after)
    number = _keys(found, question)[: most + 1].count()
    return Answer(most, How.MORE_THAN) if number > most else Answer(number)


def _oldest(processor: Definition[Any], question: Question[Any]) -> Answer[Moment]:
    """Return since when the row has been pending that has waited longest, with attempts left.

    By the order of the time, and not as an aggregate: beside the clock, which changes, PostgreSQL
    would compute it from all rows, and use no index.
    """
    since = processor.pending_since
    if since is None:
        raise NotRecordedError("set pending_since=…")
    found = question.queryset.filter(has_attempts_left(processor, question) or Q())
    time = F(since) if isinstance(since, str) else since
    timed = found.annotate(dcl_time=time, dcl_now=DatabaseNow()).order_by("dcl_time")
    read = timed.filter(dcl_time__isnull=False).values_list("dcl_time", "dcl_now").first()
    if read is not None:
        return Answer(Moment.of(*read))
    if found.order_by().exists():
        return Answer.unknown("no pending row has a value of pending_since")
    return Answer(None)


def _keys(found: QuerySet[Any, Any], question: Question[Any]) -> QuerySet[Any, Any]:
    keys: QuerySet[Any, Any] = found.order_by().values("pk")
    # A filter over a to-many relation gives a row once per match.
    return keys if question.own_table else keys.distinct()


def _of_ledger(asker: Asker, processor: Definition[Any], answers: dict[str, Answer[Any]]) -> str:
    """Add the answers that the ledger has; return what keeps rows from starting."""
    found: Answer[Any] = Answer.not_recorded(f"add {_LEDGER!r} to INSTALLED_APPS")
    if apps.is_installed(_LEDGER):
        from dcl_processor import ledger  # an app that projects may leave out

        if ledger.is_on():
            found = asker.look(ledger.alias(), lambda: Answer(ledger.state(processor)))
    state: Any = found.value
    pause = state and state.pause
    answers["paused"] = replace(found, value=pause and Moment(utc(pause.since), pause.seconds))
    answers["last_run"] = replace(found, value=state and state.last_run)
    if "pending" in answers:
        recorded = state and state.rate
        rate, left = pace(processor.name, asker.using, answers["pending"], recorded)
        answers.update(rate=rate, time_left=left)
    return state.sentence if state else ""


def waiting(
    processor: Definition[Any], *, filter: Q | None, using: str | None, limit: int | None
) -> Answer[int]:
    """Return how many rows a run with these parameters would find pending; raises no error."""
    narrowed = filter or Q()

    def read(question: Question[Any]) -> Answer[int]:
        return Answer(_keys(question.queryset.filter(narrowed), question)[:limit].count())

    return Asker(processor, using, SIZE_TIMEOUT).ask(read)
