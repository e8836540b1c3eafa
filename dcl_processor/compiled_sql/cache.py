"""The compiled statements of a window, or of a run, by name, and which values share one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from functools import partial
from typing import Any, TypeVar
from uuid import UUID
from zoneinfo import ZoneInfo

from django.core.exceptions import EmptyResultSet, FieldDoesNotExist
from django.db.models import F, Field, Model, Value
from django.db.models.constants import LOOKUP_SEP
from django.db.models.expressions import CombinedExpression
from django.db.models.functions import Coalesce, Greatest, Least, Lower, Now, Upper

from dcl_processor.clock import DatabaseNow, Later
from dcl_processor.values import Values

from .placeholders import CannotParametrize
from .update import CompiledUpdate

S = TypeVar("S")


class _Unknown:
    """The part of a name that marks a statement which fits one row alone."""


UNKNOWN = _Unknown()

#: The most statements that are kept at once; a window has a handful.
MOST_KEPT = 16


class StatementCache(threading.local):
    """The statements of one window or run; each thread compiles its own, for its own connection."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, Any] = {}
        #: Of the values that were written last: their statements, by kind.
        self._values: Values | None = None
        self._writing: dict[Hashable, CompiledUpdate | None] = {}

    def to_write(
        self,
        model: type[Model],
        using: str,
        values: Values,
        expected: Iterable[str] = (),
        **kind: bool,
    ) -> CompiledUpdate | None:
        """Return the ``CompiledUpdate`` of this kind, as ``get()`` does.

        The values are mostly the same object for all rows, and then nothing of them is examined.
        """
        name = *kind.items(), *expected
        if values is not self._values:
            self._values, self._writing = values, {}
        if name not in self._writing:
            make = partial(CompiledUpdate, model, using, values, expected, **kind)
            self._writing[name] = self.get((name, signature(values)), make)
        return self._writing[name]

    def get(self, name: tuple[Hashable, ...], make: Callable[[], S]) -> S | None:
        """Return the statement of that name; ``None`` if no statement fits every row.

        The caller then builds a queryset for its rows and executes that.
        """
        if UNKNOWN in name:
            return None
        if name not in self._kept:
            if len(self._kept) >= MOST_KEPT:
                # Each row may have an expression, and so a statement, of its own.
                self._kept.clear()
            self._kept[name] = _made(make)
        statement: S | None = self._kept[name]
        return statement


def _made(make: Callable[[], S]) -> S | None:
    try:
        return make()
    except (CannotParametrize, EmptyResultSet, FieldDoesNotExist):
        return None


def signature(values: Values) -> Hashable:
    """Return what the statements that write such values have in common, as part of their name.

    ``UNKNOWN``: one of the values may compile to something else each time.
    """
    kinds = [(name, _kind(value)) for name, value in values.items()]
    return UNKNOWN if any(kind is UNKNOWN for _, kind in kinds) else tuple(kinds)


def _kind(value: Any) -> Hashable:
    if type(value) is Later:
        return Later
    if hasattr(value, "prepare_database_save"):
        return Model  # a related row, whose key cannot be a placeholder
    if not hasattr(value, "resolve_expression"):
        return None
    known = key_of_expression(value)
    return UNKNOWN if known is None else known


# --- which values compile to the same SQL, decided without running any code of the user's
#
# A statement that was compiled for one row fits another only if the compilation itself produced
# none of its values. An expression's parameters may be produced then (``TruncDay`` uses the time
# zone that is active), and a ``Value`` may since contain another value. So an expression has a
# likeness only if all its parts are known, and the likeness includes their contents.


# Exactly these types, because a subclass may define another comparison.
_EQUAL = frozenset({type(None), bool, int, str, bytes, date, timedelta, UUID})
# Compared by repr(): 0.0 == -0.0, and a time is equal to that of another zone, but their texts
# differ.
_ALIKE = frozenset({float, Decimal, datetime, time})
_ZONES = frozenset({type(None), timezone, ZoneInfo})

# The SQL of these functions depends on their sources alone.
_FUNCTIONS = frozenset({Coalesce, Greatest, Least, Lower, Upper, Now, DatabaseNow})


def key_of_constant(value: Any) -> Hashable | None:
    """Return a key that is equal for equal constants; ``None`` if the value may be no constant."""
    kind = type(value)
    if kind in _EQUAL:
        return (kind, value)
    if kind in _ALIKE and type(getattr(value, "tzinfo", None)) in _ZONES:
        return (kind, repr(value))
    return None


def key_of_expression(expression: Any) -> Hashable | None:
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
        inner = key_of_constant(expression.value)
        return None if inner is None else (Value, inner, output)
    if kind is CombinedExpression:
        return _of_sources((kind, expression.connector, output), expression)
    return None if expression.extra else _of_sources((kind, output), expression)


def _of_sources(itself: tuple[Any, ...], expression: Any) -> Hashable | None:
    sources = [key_of_expression(source) for source in expression.get_source_expressions()]
    return None if None in sources else (*itself, *sources)


def key_of_value(value: Any) -> Hashable:
    """Return a key that is equal for a flip's values that are written alike, else a unique key."""
    if type(value) in (list, tuple):
        return (type(value), *map(key_of_value, value))
    if type(value) is dict:
        return (dict, *((key_of_value(key), key_of_value(each)) for key, each in value.items()))
    # The id() is unique, because the value is still in use.
    known = (
        key_of_expression(value) if hasattr(value, "resolve_expression") else key_of_constant(value)
    )
    return (id(value),) if known is None else known
