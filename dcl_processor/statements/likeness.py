"""Which values come to the same in a statement, judged without running any code of the user's.

A statement that was compiled for one row serves another only if nothing in it was made while it was
compiled: the parameters of an expression may be (``TruncDay`` takes the time zone that is active
then), and the value of a ``Value`` may be another one by now. So an expression has a likeness only
if all its parts are known, and it tells what they contain.
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

# Exactly these: a subclass may compare as it likes.
_EQUAL = frozenset({type(None), bool, int, str, bytes, date, timedelta, UUID})
# 0.0 == -0.0 and a time is equal to that of another zone, but a text of the two is not.
_ALIKE = frozenset({float, Decimal, datetime, time})
_ZONES = frozenset({type(None), timezone, ZoneInfo})

# What they compile to depends on their sources alone.
_FUNCTIONS = frozenset({Coalesce, Greatest, Least, Lower, Upper, Now, DatabaseNow})


def of_constant(value: Any) -> Hashable | None:
    """Return what is equal for constants that are the same; ``None`` for what may be none."""
    kind = type(value)
    if kind in _EQUAL:
        return (kind, value)
    if kind in _ALIKE and type(getattr(value, "tzinfo", None)) in _ZONES:
        return (kind, repr(value))
    return None


def of_expression(expression: Any) -> Hashable | None:
    """Return what is equal for expressions that compile alike; ``None`` if that is unknown."""
    kind = type(expression)
    if kind is F:
        # A transform may make parameters when it is compiled.
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
    """Return what is equal for values of a flip that are written alike; else each is itself."""
    if type(value) in (list, tuple):
        return (type(value), *map(of_value, value))
    if type(value) is dict:
        return (dict, *((of_value(key), of_value(each)) for key, each in value.items()))
    # A value that is in use has a place in memory of its own.
    known = of_expression(value) if hasattr(value, "resolve_expression") else of_constant(value)
    return (id(value),) if known is None else known
