"""The values that are written to a handled row."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import TYPE_CHECKING, Any

from django.core.exceptions import FieldDoesNotExist, FieldError, ValidationError
from django.db.models import Model, Value

from dcl_processor.definition.model_columns import check_columns
from dcl_processor.exceptions import InvalidDone
from dcl_processor.execution.calls import beside
from dcl_processor.interrupts import ends_the_run
from dcl_processor.masking import described
from dcl_processor.values import Values

if TYPE_CHECKING:
    from dcl_processor.definition.definition import Definition


def flip(processor: Definition[Any], row: Model, result: Any) -> Values:
    """Return the values that take a handled row out of pending, or raise ``InvalidDone``."""
    values = given(processor, row, *([result] if processor._flip_needs_result else []))
    return with_cleared_retry(processor, values)


def with_cleared_retry(processor: Definition[Any], values: Values) -> Values:
    """Add the values that the retry columns of a row without failures contain.

    A row may become pending again. Failures and claims from before its success would then use up
    its attempts. The user's own values for these columns win.
    """
    return values if processor.retry is None else {**processor.retry.untried_values(), **values}


#: The errors of a flip from which Django cannot build a statement.
UNWRITABLE = (FieldError, FieldDoesNotExist, ValidationError, TypeError, ValueError)


def invalid_done(processor: Definition[Any], error: Exception) -> InvalidDone:
    """Return the error for a flip that cannot be written."""
    return InvalidDone(
        f"{processor.name}: expected done to give columns values that they can hold, got "
        f"{described(error)}"
    )


def given(processor: Definition[Any], row: Model, *arguments: Any) -> Values:
    """Return what ``done`` gives for a row; ``arguments``: the result, if it takes that."""
    if processor._has_fixed_flip:
        return processor.done or {}  # checked before the run
    label = processor.name
    try:
        values: Any = beside(label, "get_done()", (row.pk,), processor.get_done, row, *arguments)
    except BaseException as error:
        if ends_the_run(error):
            raise
        raise InvalidDone(
            f"{label}: expected done to return a mapping of column names to values, such as "
            f"{{'sent': True}}, got {type(error).__name__} raised by it: {described(error)}"
        ) from error
    if not isinstance(values, Mapping):
        raise InvalidDone(
            f"{label}: expected done to return a mapping of column names to values, such as "
            f"{{'sent': True}}, got {values!r:.100}."
        )
    check_columns(values, type(row), label)
    # A copy, because the function may reuse the mapping, or a Value in it, for the next row.
    return {name: copy(value) if type(value) is Value else value for name, value in values.items()}
