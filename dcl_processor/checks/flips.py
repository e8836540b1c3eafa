"""Checks of what is written to rows: ``done``, ``failed``, ``reset``, ``claim``, ``on_failure``."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from django.core import checks
from django.core.checks import CheckMessage
from django.core.exceptions import ValidationError
from django.db.models import Field, Model, Value

from dcl_processor.definition.model_columns import check_columns, check_own_columns, written
from dcl_processor.exceptions import InvalidDone
from dcl_processor.processor import BatchProcessor
from dcl_processor.values import is_constant

from .questions import is_frozen, refusals


def check(processor: BatchProcessor[Any], model: type[Model]) -> Iterator[CheckMessage]:
    """Yield what is wrong with the columns; a callable flip is known only when it is called."""
    columns = {name: f for f in model._meta.concrete_fields for name in (f.name, f.attname)}
    for option, values in written(processor):
        try:
            check_columns(values, model, processor.name, option)
        except InvalidDone as error:
            sentence = str(error).removeprefix(f"{processor.name}: ")
            hint = "A flip writes the model's own columns, by the names of their fields."
            yield checks.Error(sentence, hint=hint, obj=processor.name, id="dcl_processor.E002")
            continue
        constants = {
            columns[name]: value.value if isinstance(value, Value) else value
            for name, value in values.items()
            if isinstance(value, Value) or is_constant(value)
        }
        yield from _check_unique(processor.name, option, model, constants)
        for field, value in constants.items():
            yield from _check_constant(processor.name, option, field, value)
    hint = "Abstract models with these columns are in dcl_processor.columns."
    own = partial(check_own_columns, processor, model)
    yield from refusals(processor, own, hint, "dcl_processor.E009")


def _check_unique(
    processor: str, option: str, model: type[Model], constants: Mapping[Any, Any]
) -> Iterator[CheckMessage]:
    """Yield what would fail for the second row only after its handler was called."""
    meta = model._meta
    together = [*meta.unique_together, *(each.fields for each in meta.total_unique_constraints)]
    names = {field.name for field, value in constants.items() if value is not None}
    for columns in [*together, *([f.name] for f in meta.concrete_fields if f.unique)]:
        if names.issuperset(columns):
            yield checks.Error(
                f"{option} writes the same value into {' and '.join(columns)} of every row, where "
                "values must be unique: the second row would fail.",
                hint="Give a callable or an expression, or, in get_done(), the result.",
                obj=processor,
                id="dcl_processor.E003",
            )


def _check_constant(
    processor: str, option: str, field: Field[Any, Any], value: Any
) -> Iterator[CheckMessage]:
    if problem := _problem(field, value):
        yield checks.Error(
            f"expected {option} to give {field.name} a value that its column can hold, got "
            f"{value!r}: {problem}",
            hint=f"The column is a {type(field).__name__}.",
            obj=processor,
            id="dcl_processor.E004",
        )
    default = field.get_default() if field.has_default() else field.db_default
    # False, which clears a "dirty" flag, may be the default.
    if option == "done" and value is True and getattr(default, "value", default) is True:
        yield checks.Warning(
            f"done writes True into {field.name}, and True is the default of its column: a new "
            "row counts as done, so that no run handles it.",
            hint="default=True belongs into the migration that adds the flag to old rows; the "
            "model has default=False.",
            obj=processor,
            id="dcl_processor.W009",
        )
    if is_frozen(value):
        yield checks.Warning(
            f"{option} writes {value} into {field.name}: the time was read from the clock at "
            "import, so every row gets the same time.",
            hint="Give the function itself, such as timezone.now, or the database's Now().",
            obj=processor,
            id="dcl_processor.W002",
        )


def _problem(field: Field[Any, Any], value: Any) -> str:
    """Return why a column cannot hold the value, or an empty string if it can."""
    if isinstance(value, Model):
        return ""  # for a foreign key, which update() takes as well
    if value is None:
        return "" if field.null else "the column is NOT NULL"
    try:
        with warnings.catch_warnings(action="ignore"):  # the flip will emit them
            field.to_python(value)
    except ValidationError as error:
        return " ".join(error.messages)
    except (TypeError, ValueError) as error:
        return str(error)
    return ""
