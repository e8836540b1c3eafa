"""The conditions of ``--fail-if``.

A condition is a name of a status, ``>`` or ``>=``, and a number or an age.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dcl_processor.exceptions import InvalidOption
from dcl_processor.operator.times import parse_duration

if TYPE_CHECKING:
    from dcl_processor.insights.answer import Answer

#: The names whose answer is a number of rows, and those whose answer is an age.
NUMBERS = ("pending", "due", "later", "in_progress", "in_doubt", "given_up", "locked", "lost")
AGES = ("oldest", "paused")

_CONDITION = re.compile(r"\s*(\w+)\s*(>=|>)\s*(\S+)\s*")


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition; ``text``: as it was typed in."""

    text: str
    name: str
    comparison: str
    bound: float

    def holds(self, answer: Answer[Any]) -> bool | None:
        """Return whether the condition is met; ``None``: the answer does not show it.

        Of a number that was not counted to its end only a part is known. No row is as old as the
        oldest of no rows, and no pause as long as none.
        """
        if answer.how in ("unknown", "not recorded"):
            return None
        if answer.value is None:
            return False
        least = answer.least
        is_met = least > self.bound or (self.comparison == ">=" and least == self.bound)
        return is_met or (None if answer.how == "more than" else False)


def parse(text: str) -> Condition:
    """Parse an option of the command line."""
    found = _CONDITION.fullmatch(text)
    if found is None or found[1] not in NUMBERS + AGES:
        raise argparse.ArgumentTypeError(
            f"expected a condition such as 'in_doubt>0' or 'oldest>=15m' with one of "
            f"{', '.join(NUMBERS + AGES)}, got {text!r}"
        )
    name, comparison, bound = found.groups()
    return Condition(text.strip(), name, comparison, _bound(name, bound))


def duration(text: str) -> float:
    """Parse an option that is a duration; a number alone is seconds."""
    try:
        return parse_duration(text)
    except InvalidOption as error:
        raise argparse.ArgumentTypeError(str(error).rstrip(".")) from error


def _bound(name: str, text: str) -> float:
    if name in NUMBERS:
        if not text.isdecimal():
            raise argparse.ArgumentTypeError(f"expected {name} and a number of rows, got {text!r}")
        return int(text)
    return duration(text)
