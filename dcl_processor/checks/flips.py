"""Checks of ``done``."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from django.core import checks
from django.core.checks import CheckMessage
from django.core.exceptions import ValidationError
from django.db.models import Field, Model, Value

from dcl_processor.definition import BatchProcessor
from dcl_processor.exceptions import InvalidDone
from dcl_processor.requirements import check_columns

from .clock import is_frozen

Constants = Mapping[Any, Any]


def check(processor: BatchProcessor[Any], model: type[Model]) -> Iterator[CheckMessage]:
    """Say what is wrong with the flip; a callable ``done`` is known only at the flip."""
    done = processor.done or {}
    try:
        check_columns(done, model, processor.name)
    except InvalidDone as error:
        sentence = str(error).removeprefix(f"{processor.name}: ")
        hint = "A flip writes the model's own columns, by the names of their fields."
        yield checks.Error(sentence, hint=hint, obj=processor.name, id="dcl_processor.E002")
        return
    columns = {name: f for f in model._meta.concrete_fields for name in (f.name, f.attname)}
    constants = {
        columns[name]: value.value if isinstance(value, Value) else value
        for name, value in done.items()
        if not callable(value)
        and (isinstance(value, Value) or not hasattr(value, "resolve_expression"))
    }
    yield from _check_unique(processor, model, constants)
    for field, value in constants.items():
        yield from _check_value(processor, field, value)
        yield from _check_frozen(processor, field, value)


def _check_unique(
    processor: BatchProcessor[Any], model: type[Model], constants: Constants
) -> Iterator[CheckMessage]:
    names = {field.name for field, value in constants.items() if value is not None}
    for columns, nulls_collide in _unique(model):
        values = names | {f.name for f in constants} if nulls_collide else names
        if set(columns) <= values:
            yield checks.Error(
                f"done writes the same value into {' and '.join(columns)} of every row, which is "
                "unique: the second row would fail.",
                hint="Give a callable or an expression, or the handler's result by get_done().",
                obj=processor.name,
                id="dcl_processor.E003",
            )


def _unique(model: type[Model]) -> Iterator[tuple[tuple[str, ...], bool]]:
    """Yield what is unique together in all rows, and whether NULLs count as equal there."""
    for field in model._meta.concrete_fields:
        if field.unique:
            yield (field.name,), False
    for part in (model, *model._meta.all_parents):
        for together in part._meta.unique_together:
            yield tuple(together), False
        for constraint in part._meta.total_unique_constraints:
            yield tuple(constraint.fields), constraint.nulls_distinct is False


def _check_value(
    processor: BatchProcessor[Any], field: Field[Any, Any], value: Any
) -> Iterator[CheckMessage]:
    if isinstance(value, Model):
        return  # of a foreign key, which update() takes as well
    problem = ""
    if value is None:
        problem = "" if field.null else "the column is NOT NULL"
    else:
        try:
            with warnings.catch_warnings(action="ignore"):  # the flip will give them
                field.to_python(value)
        except ValidationError as error:
            problem = " ".join(error.messages)
        except (TypeError, ValueError) as error:
            problem = str(error)
    if problem:
        yield checks.Error(
            f"expected done to give {field.name} a value that its column can hold, got {value!r}: "
            f"{problem}",
            hint=f"The column is a {type(field).__name__}.",
            obj=processor.name,
            id="dcl_processor.E004",
        )


def _check_frozen(
    processor: BatchProcessor[Any], field: Field[Any, Any], value: Any
) -> Iterator[CheckMessage]:
    if is_frozen(value):
        yield checks.Warning(
            f"done writes {value} into {field.name}, which was read from the clock at import and "
            "stays.",
            hint="Give the function itself, such as timezone.now, or the database's Now().",
            obj=processor.name,
            id="dcl_processor.W002",
        )
