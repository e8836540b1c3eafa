"""The compiled statements of a window, or of a run, by name."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import Any, TypeVar

from django.core.exceptions import EmptyResultSet, FieldDoesNotExist
from django.db.models import Model

from dcl_processor.clock import Later
from dcl_processor.database import likeness
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
        *,
        many: bool = False,
        fenced: bool = False,
    ) -> CompiledUpdate | None:
        """Return the statement of this kind that writes such values, as ``get()`` does.

        The values are mostly the same object for all rows, and then nothing of them is examined.
        """
        kind = many, fenced, *expected
        if values is not self._values:
            self._values, self._writing = values, {}
        if kind not in self._writing:
            make = partial(CompiledUpdate, model, using, values, expected, many=many, fenced=fenced)
            self._writing[kind] = self.get((kind, signature(values)), make)
        return self._writing[kind]

    def get(self, name: tuple[Hashable, ...], make: Callable[[], S]) -> S | None:
        """Return the statement of that name; ``None`` if no statement fits every row.

        The caller then builds a queryset for its rows and executes that.
        """
        if UNKNOWN in name:
            return None
        if name in self._kept:
            statement: S | None = self._kept.pop(name)
        else:
            statement = _made(make)
            if len(self._kept) >= MOST_KEPT:
                del self._kept[next(iter(self._kept))]
        # Moved to the end, to be dropped last: a row with an expression of its own has a statement
        # of its own, which must not displace the statements that every row needs.
        self._kept[name] = statement
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
    known = likeness.of_expression(value)
    return UNKNOWN if known is None else known
