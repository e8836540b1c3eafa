"""The conditions of ``--fail-if``, and the line that Nagios reads.

A condition is a name of a status, ``>`` or ``>=``, and a number or an age.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dcl_processor.exceptions import InvalidOption
from dcl_processor.masking import shown
from dcl_processor.values import parse_duration

if TYPE_CHECKING:
    from dcl_processor.insights.answer import Answer
    from dcl_processor.insights.status import Status

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

        Of a number that was not counted to its end only a part is known. An estimate may be wrong
        by any factor. No row is as old as the oldest of no rows, and no pause as long as none.
        """
        if answer.how in ("unknown", "not recorded", "estimated"):
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


# --- the one line that Nagios, and what speaks its protocol, reads: a state, a text, and figures


#: Exit codes, which are not those of the command.
OK, WARNING, CRITICAL, UNKNOWN = 0, 1, 2, 3

NAMES = {OK: "OK", WARNING: "WARNING", CRITICAL: "CRITICAL", UNKNOWN: "UNKNOWN"}

#: Characters of the text: plugins may write 4 kB, the figures included.
LONGEST = 1_000

#: The range of values that meet a condition, by its comparison; no value is below zero.
_RANGES = {">": "{}", ">=": "@{}:"}


def line(code: int, text: str, found: Sequence[Status] = (), *limits: Sequence[Condition]) -> str:
    """Return the line of a state; ``found``: the answers whose figures follow.

    ``limits``: the conditions of a WARNING, and those of a CRITICAL; the first of each name.
    """
    # A bar begins the figures.
    said = shown(text, LONGEST).replace("|", "/")
    ranges = [
        {c.name: _RANGES[c.comparison].format(f"{c.bound}".removesuffix(".0")) for c in limit[::-1]}
        for limit in limits
    ]
    figures = " ".join(_figures(found, ranges))
    return f"DCL {NAMES[code]} - {said}{f' | {figures}' if figures else ''}"


def _figures(found: Sequence[Status], ranges: Sequence[Mapping[str, str]]) -> Iterator[str]:
    for each in found:
        for name, answer in each.answers.items():
            if answer.how in ("unknown", "not recorded"):
                continue
            label = name if len(found) == 1 else f"{each.name}.{name}"
            value = f"{answer.least:.0f}{'s' if name in AGES else ''}"
            figure = ";".join([value, *(limit.get(name, "") for limit in ranges)])
            yield f"{_quoted(label)}={figure.rstrip(';')}"


def _quoted(label: str) -> str:
    return label if re.fullmatch(r"[\w.-]+", label) else "'{}'".format(label.replace("'", "''"))
