"""The conditions of ``--fail-if``: a name of a status, a comparison, and a number or an age."""

from __future__ import annotations

import argparse
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dcl_processor.exceptions import InvalidOption
from dcl_processor.values import parse_duration

if TYPE_CHECKING:
    from dcl_processor.insights.answer import Answer

#: The names whose answer is a number of rows, and those whose answer is an age.
NUMBERS = ("pending", "due", "later", "in_progress", "in_doubt", "given_up", "locked", "lost")
AGES = ("oldest", "paused")

#: Digits of a number of rows, which a database can still count to.
MOST_DIGITS = 18

_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
    "=": operator.eq,
}
_CONDITION = re.compile(r"\s*(\w+)\s*(>=|<=|>|<|=)\s*(\S+)\s*")


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition; ``text``: as it was typed in."""

    text: str
    name: str
    comparison: str
    bound: float

    def holds(self, answer: Answer[Any]) -> bool | None:
        """Return whether the condition is met; ``None``: the answer does not show it.

        A number that was not counted to its end is more than the value, and that of locked rows at
        least the value. An estimate may be wrong by any factor. No row is as old as the oldest of
        no rows, and no pause as long as none.
        """
        if answer.how in ("unknown", "not recorded", "estimated"):
            return None
        value = answer.value
        if value is None:
            return False
        number = value.rows if self.name == "locked" else value
        if self.name in AGES:
            number = value.seconds
        if answer.how == "more than":
            return self._holds_from(number if self.name == "locked" else number + 1)
        return _COMPARISONS[self.comparison](number, self.bound)

    def _holds_from(self, least: float) -> bool | None:
        """Return whether the condition is met by this number and all above it, or by none."""
        match self.comparison:
            case ">" | ">=":
                return True if _COMPARISONS[self.comparison](least, self.bound) else None
            case "<":
                return None if least < self.bound else False
            case _:
                return None if least <= self.bound else False


def parse(text: str) -> Condition:
    """Parse an option of the command line."""
    found = _CONDITION.fullmatch(text)
    if found is None or found[1] not in NUMBERS + AGES:
        raise argparse.ArgumentTypeError(
            f"expected a condition such as 'in_doubt>0' or 'oldest>15m' with one of "
            f"{', '.join(NUMBERS + AGES)}, got {text!r}"
        )
    name, comparison, bound = found.groups()
    return Condition(text.strip(), name, comparison, _bound(name, bound))


def _bound(name: str, text: str) -> float:
    if name in NUMBERS:
        if not text.isdecimal() or len(text) > MOST_DIGITS:
            raise argparse.ArgumentTypeError(
                f"expected {name} and a number of rows of up to {MOST_DIGITS} digits, got {text!r}"
            )
        return int(text)
    try:
        return parse_duration(text)
    except InvalidOption as error:
        raise argparse.ArgumentTypeError(str(error).rstrip(".")) from error
