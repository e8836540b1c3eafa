"""What a processor's options require of the model: columns that exist and have the right kind."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from django.core.validators import MaxValueValidator
from django.db.models import (
    DateTimeField,
    Field,
    Model,
    PositiveSmallIntegerField,
    SmallIntegerField,
)

from dcl_processor.exceptions import InvalidDone, InvalidOption
from dcl_processor.values import Values

if TYPE_CHECKING:
    from .definition import Definition

#: The options whose values are written to a row.
FLIPS = ("done", "failed", "reset", "claim")

#: The highest number in an integer of two bytes, Django's smallest.
_SMALL = 2**15 - 1


def written(processor: Definition[Any]) -> Iterator[tuple[str, Values]]:
    """Yield each option whose values are written to a row, and these values."""
    for option in FLIPS:
        yield option, getattr(processor, option) or {}
    if processor.retry is not None:
        yield "on_failure", processor.retry.on_failure or {}


def check(processor: Definition[Any], model: type[Model], using: str) -> None:
    """Raise unless the model has the columns that the processor would write on this database."""
    for option, values in written(processor):
        check_columns(values, model, processor.name, option)
    check_own_columns(processor, model)
    if processor.lease is not None:
        processor.lease.check_clock(model, using, processor.name)


def check_own_columns(processor: Definition[Any], model: type[Model]) -> None:
    """Raise unless the model has the columns of the processor's own bookkeeping."""
    if processor.claimed_at is not None:
        words = "a nullable DateTimeField"
        named = f"{processor.name}: expected claimed_at={processor.claimed_at!r}"
        expect_column(
            model, processor.claimed_at, DateTimeField, null=True, named=named, words=words
        )
    if processor.retry is not None:
        processor.retry.check(model, processor.name)
    if processor.lease is not None:
        processor.lease.check(model, processor.name)


def check_columns(values: Values, model: type[Model], label: str, option: str = "done") -> None:
    """Raise ``InvalidDone`` unless every name is a column of the model that a flip may write."""
    columns = {name: f for f in model._meta.concrete_fields for name in (f.name, f.attname)}
    for name in values:
        if name not in columns:
            raise InvalidDone(
                f"{label}: expected {option} to name columns of {model._meta.label}, got {name!r}; "
                f"the columns are {', '.join(f.name for f in model._meta.concrete_fields)}."
            )
        if columns[name].primary_key or columns[name].generated:
            raise InvalidDone(
                f"{label}: expected {option} to name columns that a flip may write, got {name!r}, "
                f"which is {'the primary key' if columns[name].primary_key else 'generated'}."
            )


def by_attname(model: type[Model], values: Values) -> dict[str, Any]:
    """Return the values by the ``attname`` of their columns: a foreign key has two names."""
    meta: Any = model._meta
    return {meta.get_field(name).attname: value for name, value in values.items()}


def expect_column(
    model: type[Model],
    name: str,
    kind: type[Field[Any, Any]] | tuple[type[Field[Any, Any]], ...],
    *,
    null: bool | None = None,
    named: str,
    words: str,
) -> None:
    """Raise ``InvalidOption`` unless the model has such a column; ``null``: whether it may be NULL.

    ``named`` and ``words`` are the beginning and the middle of the sentence.
    """
    column = {field.name: field for field in model._meta.concrete_fields}.get(name)
    fits = isinstance(column, kind) and not column.primary_key and not column.generated
    if fits and null in (None, column.null):  # type: ignore[union-attr]  # it fits: it is one
        return
    raise InvalidOption(
        f"{named} to name {words} of {model._meta.label}, got {_kind_of(column)}; add the column, "
        "or name another."
    )


def is_nullable(model: type[Model], name: str) -> bool:
    """Return whether the model has such a column, which may be NULL."""
    return any(field.name == name and field.null for field in model._meta.concrete_fields)


def highest_number(model: type[Model], name: str) -> float:
    """Return the highest number that an integer column can hold; infinite: the database's own.

    Django's own validators of the column know its size on this database.
    """
    column: Any = model._meta.get_field(name)
    small = isinstance(column, SmallIntegerField | PositiveSmallIntegerField)
    highest: float = _SMALL if small else math.inf
    for each in column.validators:
        if isinstance(each, MaxValueValidator):
            limit: Any = each.limit_value() if callable(each.limit_value) else each.limit_value
            highest = min(highest, limit)
    return highest


def _kind_of(column: Any) -> str:
    if column is None:
        return "no such column"
    kind = "the primary key" if column.primary_key else f"a {type(column).__name__}"
    return f"{kind} that {'may' if column.null else 'cannot'} be NULL"
