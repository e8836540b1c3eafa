"""Which values compile to the same SQL, decided without running any code of the user's.

A statement that was compiled for one row fits another only if the compilation itself produced none
of its values. An expression's parameters may be produced then (``TruncDay`` uses the time zone that
is active), and a ``Value`` may since contain another value. So an expression has a likeness only if
all its parts are known, and the likeness includes their contents.
"""

from __future__ import annotations

from collections.abc import Hashable
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

from django.db.models import F, Field, Value
from django.db.models.constants import LOOKUP_SEP
from django.db.models.expressions import CombinedExpression
from django.db.models.functions import Coalesce, Greatest, Least, Lower, Now, Upper

from dcl_processor.clock import DatabaseNow

# Exactly these types, because a subclass may define another comparison.
_EQUAL = frozenset({type(None), bool, int, str, bytes, date, timedelta, UUID})
# Compared by repr(): 0.0 == -0.0, and a time is equal to that of another zone, but their texts
# differ.
_ALIKE = frozenset({float, Decimal, datetime, time})
_ZONES = frozenset({type(None), timezone, ZoneInfo})

# The SQL of these functions depends on their sources alone.
_FUNCTIONS = frozenset({Coalesce, Greatest, Least, Lower, Upper, Now, DatabaseNow})


def of_constant(value: Any) -> Hashable | None:
    """Return a key that is equal for equal constants; ``None`` if the value may be no constant."""
    kind = type(value)
    if kind in _EQUAL:
        return (kind, value)
    if kind in _ALIKE and type(getattr(value, "tzinfo", None)) in _ZONES:
        return (kind, repr(value))
    return None


def of_expression(expression: Any) -> Hashable | None:
    """Return a key that is equal for expressions that compile alike; ``None`` if unknown."""
    kind = type(expression)
    if kind is F:
        # A transform may create parameters when it is compiled.
        return None if LOOKUP_SEP in expression.name else (F, expression.name)
    if kind is not Value and kind is not CombinedExpression and kind not in _FUNCTIONS:
        return None
    output = vars(expression).get("output_field")
    if output is not None and not type(output).__module__.startswith(Field.__module__):
        return None
    if kind is Value:
        inner = of_constant(expression.value)
        return None if inner is None else (Value, inner, output)
    if kind is CombinedExpression:
        return _of_sources((kind, expression.connector, output), expression)
    return None if expression.extra else _of_sources((kind, output), expression)


def _of_sources(itself: tuple[Any, ...], expression: Any) -> Hashable | None:
    sources = [of_expression(source) for source in expression.get_source_expressions()]
    return None if None in sources else (*itself, *sources)


def of_value(value: Any) -> Hashable:
    """Return a key that is equal for a flip's values that are written alike, else a unique key."""
    if type(value) in (list, tuple):
        return (type(value), *map(of_value, value))
    if type(value) is dict:
        return (dict, *((of_value(key), of_value(each)) for key, each in value.items()))
    # The id() is unique, because the value is still in use.
    known = of_expression(value) if hasattr(value, "resolve_expression") else of_constant(value)
    return (id(value),) if known is None else known
