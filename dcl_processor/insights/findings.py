"""What ``doctor`` has found out about one thing."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from functools import partial
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
    """One line. ``what`` is found, ``why`` it matters, and what to do to ``fix`` it.

    These are sentences without a period; the last two are empty if nothing is to be done.
    ``check``: its short name; ``about``: the database, the table or the processor. The doctor adds
    them, unless a finding is about something else.
    """

    level: Level
    what: str
    why: str = ""
    fix: str = ""
    about: str = ""
    check: str = ""

    def __str__(self) -> str:
        sentences = [each for each in (self.what, self.why, self.fix) if each]
        return f"{self.level}: {self.check}, {self.about}: {'. '.join(sentences)}."

    def as_dict(self) -> dict[str, Any]:
        """Return the finding for JSON."""
        texts = {each.name: getattr(self, each.name) for each in fields(self)}
        return {**texts, "level": self.level.name.lower()}


ok = partial(Finding, Level.OK)
warning = partial(Finding, Level.WARNING)
problem = partial(Finding, Level.PROBLEM)
unknown = partial(Finding, Level.UNKNOWN)
