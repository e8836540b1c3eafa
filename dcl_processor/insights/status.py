"""What waits, what is being handled, what is stuck, since when and why."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from django.apps import apps
from django.db.models import Count, F, Min, Q, QuerySet

from dcl_processor.insights import rows
from dcl_processor.insights.answer import TIMEOUT, Answer, Asker, Moment
from dcl_processor.operator.states import NotRecordedError, has_attempts_left
from dcl_processor.operator.times import utc
from dcl_processor.options.options import Definition
from dcl_processor.pending import steady as time
from dcl_processor.pending.clock import DatabaseNow
from dcl_processor.pending.question import Question
from dcl_processor.report.report import MOST_COUNTED

#: The most rows that are looked at.
MOST = MOST_COUNTED

#: Seconds between two looks that give a rate.
SHORTEST, LONGEST = 0.5, 600.0

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

#: The last look of this process at a processor on a database: when, and how many were pending.
_looks: dict[tuple[str, str | None], tuple[float, int]] = {}


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
        there |= {"?" for answer in self.answers.values() if answer.how == "unknown"}
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
    counts as in doubt, at least ``default_age()``. ``most``: the rows that are looked at at most.
    ``down``: as for an ``Asker``.
    """
    most, wanted = most or MOST, {*NUMBERS} if only is None else {*only}
    needed = wanted | {"pending"} if wanted & {"rate", "time_left"} else wanted
    asker = Asker(processor, using, seconds, down)
    answers: dict[str, Answer[Any]] = {}
    for state in rows.STATES:
        if state in needed:
            answers[state] = asker.ask(partial(_count, processor, state, doubt_after, most))
    if "oldest" in needed:
        answers["oldest"] = asker.ask(partial(_oldest, processor, most))
    kept_back = _of_ledger(asker, processor, answers) if needed & {*OF_LEDGER} else ""
    answers = {name: answers[name] for name in NUMBERS if name in wanted}
    return Status(processor.name, str(processor.delivery), asker.using, answers, kept_back)


def _count(
    processor: Definition[Any],
    state: str,
    doubt_after: float | None,
    most: int,
    question: Question[Any],
) -> Answer[int]:
    """Return how many rows are in a state; ``most``: the rows that are counted at most."""
    found = rows.in_state(state, processor, question, doubt_after)
    number = _keys(found, question)[: most + 1].count()
    return Answer(most, "more than") if number > most else Answer(number)


def _oldest(processor: Definition[Any], most: int, question: Question[Any]) -> Answer[Moment]:
    """Return since when the row has been pending that has waited longest, with attempts left.

    ``most``: the rows that are looked at, the first by their keys. A time of all rows would take as
    long as the backlog, and longer over a join.
    """
    since = processor.pending_since
    if since is None:
        raise NotRecordedError("set pending_since=…")
    left = question.queryset.filter(has_attempts_left(processor, question) or Q())
    at = F(since) if isinstance(since, str) else since
    some = left.annotate(dcl_at=at, dcl_now=DatabaseNow()).order_by("pk")[: most + 1]
    read = some.aggregate(at=Min("dcl_at"), now=Min("dcl_now"), number=Count("pk"))
    if read["number"] and read["at"] is None:
        return Answer(None, "unknown", "no pending row has a value of pending_since")
    moment = Moment.of(read["at"], read["now"])
    return Answer(moment, "more than") if read["number"] > most else Answer(moment)


def _keys(found: QuerySet[Any, Any], question: Question[Any]) -> QuerySet[Any, Any]:
    keys: QuerySet[Any, Any] = found.order_by().values("pk")
    # A filter over a to-many relation gives a row once per match.
    return keys if question.own_table else keys.distinct()


# --- what the ledger has, and how fast rows leave the backlog


def _of_ledger(asker: Asker, processor: Definition[Any], answers: dict[str, Answer[Any]]) -> str:
    """Add the answers that the ledger has; return what keeps rows from starting."""
    found: Answer[Any] = Answer(None, "not recorded", f"add {_LEDGER!r} to INSTALLED_APPS")
    if apps.is_installed(_LEDGER):
        from dcl_processor import ledger  # an app that projects may leave out

        if ledger.is_on():
            found = asker.look(ledger.alias(), lambda: Answer(ledger.state(processor)))
    state: Any = found.value
    pause = state and state.pause
    answers["paused"] = replace(found, value=pause and Moment(utc(pause.since), pause.seconds))
    answers["last_run"] = replace(found, value=state and state.last_run)
    if "pending" in answers:
        looked = _rate_of_looks(processor.name, asker.using, answers["pending"])
        rate = looked if state is None or state.rate is None else state.rate
        answers["rate"], answers["time_left"] = _pace(answers["pending"], rate)
    return state.sentence if state else ""


def _pace(pending: Answer[int], rate: float | None) -> tuple[Answer[float], Answer[float]]:
    """Return the rows a second, and the seconds until no row is pending; ``None``: none is."""
    if pending.value is None:
        return Answer(None, "unknown", pending.why), Answer(None, "unknown", pending.why)
    why = "it takes the ledger, or a second look, at fewer rows"
    none: Answer[float] = Answer(None, "not recorded", why)
    found = none if rate is None else Answer(rate)
    if not pending.value:
        return found, Answer(None)
    return found, Answer(round(pending.value / rate, 1), pending.how) if rate else none


def _rate_of_looks(name: str, using: str | None, pending: Answer[int]) -> float | None:
    """Note a look; return by how many rows a second the backlog has shrunk since the one before.

    Not below 0: a backlog that grows shows nothing of how fast its rows are handled.
    """
    if pending.value is None or pending.how != "exact":
        return None
    now = time.monotonic()
    last, before = _looks.setdefault((name, using), (now, pending.value))
    if now - last < SHORTEST:
        return None
    _looks[name, using] = now, pending.value
    rate = max(before - pending.value, 0) / (now - last)
    return rate if now - last <= LONGEST else None
