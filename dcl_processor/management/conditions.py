"""The conditions of ``--fail-if``: a name of a status, ``>`` or ``>=``, and a number or an age."""

from __future__ import annotations

import argparse
import operator
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dcl_processor.management import printing
from dcl_processor.management.command_line import duration, misuse, whole

if TYPE_CHECKING:
    from dcl_processor.insights.status import Status

#: The names whose answer is a number of rows, and those whose answer is an age.
NUMBERS = ("pending", "due", "held", "later", "in_progress", "in_doubt", "given_up")
AGES = ("oldest", "paused")

_CONDITION = re.compile(rf"\s*({'|'.join(NUMBERS + AGES)})\s*(>=|>)\s*(\S+)\s*")
_COMPARISONS = {">": operator.gt, ">=": operator.ge}


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition; ``text``: as it was typed in."""

    text: str
    name: str
    comparison: str
    bound: float

    def is_met(self, found: Status) -> bool:
        """Return whether the status shows that it is met.

        No row is as old as the oldest of no rows, and no pause as long as none. Rows are counted
        up to the bound at least.
        """
        answer = found.answers[self.name]
        is_known = answer.value is not None
        return is_known and _COMPARISONS[self.comparison](answer.least, self.bound)


def parse(text: str) -> Condition:
    """Parse an option of the command line."""
    found = _CONDITION.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(
            f"expected a condition such as 'in_doubt>0' or 'oldest>=15m' with one of "
            f"{', '.join(NUMBERS + AGES)}, got {text!r}"
        )
    name, comparison, bound = found.groups()
    parse_bound = duration() if name in AGES else whole(0)
    return Condition(text.strip(), name, comparison, parse_bound(bound))


def met(found: Sequence[Status], wanted: Sequence[Condition]) -> Iterator[str]:
    """Yield a sentence for each condition that a processor meets.

    Raises ``CommandError`` for one that no answer can ever meet: its monitor would always be green.
    """
    for each in found:
        for condition in wanted:
            answer = each.answers[condition.name]
            if answer.how == "not recorded":
                expected = f"expected a condition with an answer that {each.name} has"
                got = f"got {condition.text!r}: {answer.why}; or name other processors."
                raise misuse(f"{expected}, {got}")
            if condition.is_met(each):
                yield f"{each.name}: {condition.text}, got {printing.answer(answer)}"
