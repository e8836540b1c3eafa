"""What ``doctor`` has found out about one thing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


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
