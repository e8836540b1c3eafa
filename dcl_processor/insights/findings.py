"""What ``doctor`` has found out about one thing."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from django.apps import apps

from dcl_processor.processor import BatchProcessor

from .answer import Answer, Asker, Moment

if TYPE_CHECKING:
    from dcl_processor.ledger import State


class Level(StrEnum):
    """How a finding is to be taken.

    ``OK``: as it should be. ``NOTE``: so it is, and worth knowing. ``WARNING``: it costs time,
    or loses something when something else fails. ``PROBLEM``: rows are not handled, or are handled
    wrongly. ``UNKNOWN``: it could not be found out now, or by this role. ``LEFT_OUT``: it is never
    found out here.
    """

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    PROBLEM = "problem"
    UNKNOWN = "could not be found out"
    LEFT_OUT = "left out"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line. ``check``: its short name; ``about``: the database, the table or the processor.

    ``what`` is found, ``why`` it matters, and what to do to ``fix`` it: sentences without a period.
    The last two are empty if nothing is to be done.
    """

    level: Level
    check: str
    about: str
    what: str
    why: str = ""
    fix: str = ""

    def __str__(self) -> str:
        sentences = [each for each in (self.what, self.why, self.fix) if each]
        return f"{self.level}: {self.check}, {self.about}: {'. '.join(sentences)}."

    def as_dict(self) -> dict[str, Any]:
        """Return the finding for JSON."""
        return {
            "level": self.level.name.lower(),
            "check": self.check,
            "about": self.about,
            "what": self.what,
            "why": self.why,
            "fix": self.fix,
        }


def ok(check: str, about: str, what: str) -> Finding:
    return Finding(Level.OK, check, about, what)


# --- what the ledger has of a processor, if the project has the ledger


LEDGER = "dcl_processor.ledger"

#: The names of its answers.
NAMES = ("paused", "lost")
#: Recorded runs whose handlers are looked at.
RUNS = 100


def has_ledger() -> bool:
    """Return whether the app is installed."""
    return apps.is_installed(LEDGER)


def slowest(processor: BatchProcessor[Any]) -> float | None:
    """Return the seconds of the slowest handler of the last recorded runs, if there are any."""
    if not has_ledger():
        return None
    from dcl_processor.ledger import history  # has models

    runs = history(processor, limit=RUNS)
    return max((run.slowest for run in runs), default=0.0) or None


def of_ledger(
    processor: BatchProcessor[Any],
    wanted: Collection[str],
    seconds: float,
    down: dict[str, str] | None,
) -> dict[str, Any]:
    """Return what is wanted of ``NAMES``, and what keeps rows from starting, in words.

    "paused": since when the processor is paused; "lost": how many runs have no heartbeat and no
    end. ``seconds``, ``down``: as for ``Asker``.
    """
    if not has_ledger():
        why = f"add {LEDGER!r} to INSTALLED_APPS"
        return {"answers": {name: Answer[Any].not_recorded(why) for name in wanted}}
    from dcl_processor.ledger import state  # has models
    from dcl_processor.ledger.tables import alias

    found: Answer[State] = Asker(processor, seconds, down).ask(
        alias(), lambda: Answer(state(processor))
    )
    if found.value is None:
        return {"answers": {name: Answer[Any].unknown(found.why) for name in wanted}}
    pause = found.value.pause
    moment = None if pause is None else Moment(pause.since, pause.seconds)
    known: dict[str, Answer[Any]] = {"paused": Answer(moment), "lost": Answer(found.value.lost)}
    answers = {name: known[name] for name in wanted}
    return {"answers": answers, "kept_back": found.value.sentence}
