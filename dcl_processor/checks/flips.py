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
from dcl_processor.values import Values, is_constant

from .questions import is_frozen, refusals

Constants = Mapping[Any, Any]


def check(processor: BatchProcessor[Any], model: type[Model]) -> Iterator[CheckMessage]:
    """Yield what is wrong with the columns; a callable flip is known only when it is called."""
    for option, values in written(processor):
        yield from _Flip(processor, model, option, values).check()
    hint = "Abstract models with these columns are in dcl_processor.columns."
    own = partial(check_own_columns, processor, model)
    yield from refusals(processor, own, hint, "dcl_processor.E009")


class _Flip:
    """One option's columns and values."""

    def __init__(
        self, processor: BatchProcessor[Any], model: type[Model], option: str, values: Values
    ) -> None:
        self.name = processor.name
        self.model = model
        self.option = option
        self.values = values

    def check(self) -> Iterator[CheckMessage]:
        try:
            check_columns(self.values, self.model, self.name, self.option)
        except InvalidDone as error:
            sentence = str(error).removeprefix(f"{self.name}: ")
            hint = "A flip writes the model's own columns, by the names of their fields."
            yield checks.Error(sentence, hint=hint, obj=self.name, id="dcl_processor.E002")
            return
        constants = self._constants()
        yield from self._check_unique(constants)
        for field, value in constants.items():
            yield from self._check_value(field, value)
            yield from self._check_default(field, value)
            yield from self._check_frozen(field, value)

    def _constants(self) -> Constants:
        columns = {
            name: f for f in self.model._meta.concrete_fields for name in (f.name, f.attname)
        }
        return {
            columns[name]: value.value if isinstance(value, Value) else value
            for name, value in self.values.items()
            if isinstance(value, Value) or is_constant(value)
        }

    def _check_unique(self, constants: Constants) -> Iterator[CheckMessage]:
        names = {field.name for field, value in constants.items() if value is not None}
        for columns, nulls_collide in _unique(self.model):
            values = names | {f.name for f in constants} if nulls_collide else names
            if set(columns) <= values:
                yield checks.Error(
                    f"{self.option} writes the same value into {' and '.join(columns)} of every "
                    "row, where values must be unique: the second row would fail.",
                    hint="Give a callable or an expression, or, in get_done(), the result.",
                    obj=self.name,
                    id="dcl_processor.E003",
                )

    def _check_value(self, field: Field[Any, Any], value: Any) -> Iterator[CheckMessage]:
        if problem := _problem(field, value):
            yield checks.Error(
                f"expected {self.option} to give {field.name} a value that its column can hold, "
                f"got {value!r}: {problem}",
                hint=f"The column is a {type(field).__name__}.",
                obj=self.name,
                id="dcl_processor.E004",
            )

    def _check_default(self, field: Field[Any, Any], value: Any) -> Iterator[CheckMessage]:
        """Yield that a new row counts as done; ``False``, which clears a "dirty" flag, may."""
        default = field.get_default() if field.has_default() else field.db_default
        if self.option == "done" and value is True and getattr(default, "value", default) is True:
            yield checks.Warning(
                f"done writes True into {field.name}, and True is the default of its column: a new "
                "row counts as done, so that no run handles it.",
                hint="default=True belongs into the migration that adds the flag to old rows; the "
                "model has default=False.",
                obj=self.name,
                id="dcl_processor.W009",
            )

    def _check_frozen(self, field: Field[Any, Any], value: Any) -> Iterator[CheckMessage]:
        if is_frozen(value):
            yield checks.Warning(
                f"{self.option} writes {value} into {field.name}: the time was read from the clock "
                "at import, so every row gets the same time.",
                hint="Give the function itself, such as timezone.now, or the database's Now().",
                obj=self.name,
                id="dcl_processor.W002",
            )


def _unique(model: type[Model]) -> Iterator[tuple[tuple[str, ...], bool]]:
    """Yield the columns that are unique together in all rows, and whether NULLs count as equal."""
    for field in model._meta.concrete_fields:
        if field.unique:
            yield (field.name,), False
    for part in (model, *model._meta.all_parents):
        for together in part._meta.unique_together:
            yield tuple(together), False
        for constraint in part._meta.total_unique_constraints:
            yield tuple(constraint.fields), constraint.nulls_distinct is False


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
