"""Group the rows that one flip statement can write, because their values are the same."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from datetime import date
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from dcl_processor.database import likeness
from dcl_processor.values import Values

# Equal if they call the same function; other callables may define any comparison, or none.
_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType)


def group(flips: Mapping[Any, Values]) -> list[tuple[Values, list[Any]]]:
    """Group rows by the values of their flips, whose callables are called.

    A callable is called for each row, as it would be without a batch, because it may return a
    token, which two rows must not share. The exception is a clock: it returns the time of the
    statement, and a call for each row would make a statement for each row.
    """
    moments: dict[Any, date] = {}
    groups: dict[Hashable, tuple[Values, list[Any]]] = {}
    plain: dict[int, list[Any]] = {}
    for pk, values in flips.items():
        # The processor's own ``done`` is the same object for all rows.
        if (known := plain.get(id(values))) is not None:
            known.append(pk)
            continue
        resolved = {name: _call(value, moments) for name, value in values.items()}
        # With the user's values, == and hash() may fail, or have another meaning.
        alike = tuple((name, likeness.of_value(value)) for name, value in resolved.items())
        _, pks = groups.setdefault(alike, (resolved, []))
        pks.append(pk)
        if not any(callable(value) for value in values.values()):
            plain[id(values)] = pks
    return list(groups.values())


def _call(value: Any, moments: dict[Any, date]) -> Any:
    if not callable(value):
        return value
    called = value if type(value) in _FUNCTIONS else id(value)
    if called in moments:
        return moments[called]
    given = value()
    if isinstance(given, date):
        moments[called] = given
    return given
