"""What users write for durations, for numbers, and for the values of columns; parsed here alone.

A function ``expect…()`` raises ``InvalidOption`` with one sentence, of which ``named`` is the
beginning, such as "expected limit", and ``fix`` the end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from dcl_processor.report.exceptions import InvalidOption

#: Columns by name, and what is written to them: constants, Django's expressions, or callables
#: without arguments that return either.
Values = Mapping[str, Any]

#: Seconds.
DAY, TEN_YEARS = 86_400.0, 10 * 366 * 86_400.0
_IN_WORDS = {DAY: "a day", TEN_YEARS: "ten years"}


def seconds(duration: float | timedelta) -> float:
    """Return a duration in seconds; numbers are seconds."""
    return duration.total_seconds() if isinstance(duration, timedelta) else float(duration)


def as_timedelta(duration: float | timedelta) -> timedelta:
    """Return a duration as a ``timedelta``; numbers are seconds."""
    return duration if isinstance(duration, timedelta) else timedelta(seconds=duration)


def is_number(value: Any) -> bool:
    """Return whether the value is an ``int`` or a ``float``; a ``bool`` is not meant as one."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def expect(fits: object, named: str, words: str, value: Any, fix: str = "") -> None:
    """Raise unless the value fits; ``words`` say which values do."""
    if not fits:
        raise InvalidOption(f"{named} to be {words}, got {value!r}{fix}.")


def expect_type(named: str, value: Any, kind: Any, words: str) -> None:
    """Raise unless the value is of a type, or of one of several."""
    expect(isinstance(value, kind), named, words, value)


def expect_seconds(
    named: str,
    value: Any,
    *,
    least: float = 0,
    most: float = math.inf,
    above_zero: bool = False,
    fix: str = "",
) -> float:
    """Return a duration in seconds; raise unless it is one within these bounds."""
    number: Any = value.total_seconds() if isinstance(value, timedelta) else value
    fits = is_number(number) and least <= number <= most and not (above_zero and number == 0)
    bounds = "above 0" if above_zero else f"from {least:g}"
    words = f"a number of seconds {bounds}{_up_to(most)}, or a timedelta"
    expect(fits, named, words, value, fix)
    return float(number)


def expect_whole_number(
    named: str, value: Any, *, of: str, least: int, most: float = math.inf, fix: str = ""
) -> int:
    """Return the value; raise unless it is a whole number within these bounds."""
    fits = isinstance(value, int) and is_number(value) and least <= value <= most
    expect(fits, named, f"a whole number of {of} from {least}{_up_to(most)}", value, fix)
    whole: int = value
    return whole


def _up_to(most: float) -> str:
    return "" if most == math.inf else f" to {_IN_WORDS.get(most, f'{most:.0f}')}"


def is_constant(value: Any) -> bool:
    """Return whether a column's value is written as it is: no expression, and not called."""
    return not callable(value) and not hasattr(value, "resolve_expression")


def constants_of(values: Values) -> dict[str, Any]:
    """Return those of the values that are constants, by which a written row can be found."""
    return {name: value for name, value in values.items() if is_constant(value)}


def resolve(values: Values) -> Values:
    """Call the values that are callables, as ``update_or_create()`` does."""
    if not any(map(callable, values.values())):
        return values
    return {name: value() if callable(value) else value for name, value in values.items()}
