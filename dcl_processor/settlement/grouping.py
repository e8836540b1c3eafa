"""Which rows one flip statement can write: those whose values are the same."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from typing import Any

Values = Mapping[str, Any]


def group(flips: Mapping[Any, Values]) -> list[tuple[Values, list[Any]]]:
    """Group rows by the values of their flips, whose callables are called.

    A callable is called for each row, as it would be without a batch: what it gives may be a
    token, which two rows must not share. The exception is a clock, which says when the statement
    was made and would otherwise make a statement for every row.
    """
    moments: dict[Any, date] = {}
    groups: dict[str, list[tuple[Values, list[Any]]]] = {}
    plain: dict[int, list[Any]] = {}
    for pk, values in flips.items():
        # The processor's own ``done`` is one and the same for all rows.
        if (known := plain.get(id(values))) is not None:
            known.append(pk)
            continue
        resolved = {name: _call(value, moments) for name, value in values.items()}
        # True == 1 and 0 == -0.0, but a column of JSON or text tells them apart, and so does repr.
        alike = groups.setdefault(repr(resolved), [])
        pks = next((pks for others, pks in alike if others == resolved), None)
        if pks is None:
            pks = []
            alike.append((resolved, pks))
        pks.append(pk)
        if not any(callable(value) for value in values.values()):
            plain[id(values)] = pks
    return [each for alike in groups.values() for each in alike]


def _call(value: Any, moments: dict[Any, date]) -> Any:
    if not callable(value):
        return value
    if value in moments:
        return moments[value]
    given = value()
    if isinstance(given, date):
        moments[value] = given
    return given
