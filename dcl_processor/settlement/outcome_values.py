"""The values that are written to a row: its flip, or what records its failure."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import nullcontext
from copy import copy
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from django.core.exceptions import FieldDoesNotExist, FieldError, ValidationError
from django.db import DEFAULT_DB_ALIAS, connections
from django.db.models import Model, Value
from django.db.transaction import atomic

from dcl_processor import log_fields
from dcl_processor.definition.model_columns import check_columns
from dcl_processor.errors import add_note
from dcl_processor.exceptions import AttemptsUsedUp, InvalidDone, InvalidOption
from dcl_processor.execution.handler import Discarded, Failed, Outcome, Snoozed
from dcl_processor.interrupts import ends_the_run
from dcl_processor.masking import described
from dcl_processor.values import Values

if TYPE_CHECKING:
    from dcl_processor.definition.definition import Definition


logger = logging.getLogger("dcl_processor")


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
        values: Any = processor.get_done(row, *arguments)
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


# --- of a row that was not handled


def notes(
    processor: Definition[Any],
    row: Model,
    outcome: Outcome,
    *,
    attempt: int,
    most: int | None = None,
    undone: Values | None = MappingProxyType({}),
) -> tuple[Outcome, Values]:
    """Return the outcome to report for a row that was not handled, and the values to write to it.

    ``attempt``: its number, from 1; ``most``: how many the row has, or ``None`` if there is no
    limit. ``undone``: the values that restore the row as it was before
    its claim; ``None``: it cannot be restored.
    """
    retry, model = processor.retry, type(row)
    match outcome:
        case Discarded(error):
            values = _dead_letter(processor, row, error)
            if values:
                noted: Values = retry.given_up(error, attempt, model) if retry else {}
                return outcome, {**noted, **values}
            if not processor._has_dead_letter:
                error = _without(processor, "failed", "Discard", "pending")
            # The attempt counts, as that of a handler that discards its row does.
            return Failed(error), retry.after(error, attempt, model) if retry else {}
        case Snoozed():
            return _snoozed(processor, outcome, undone)
        case Failed(error) if retry is None:
            # The first failure is the last. A flip that could not be written gives no row up: the
            # cause is mostly a mistake in ``done``, which affects all rows.
            noted = {} if outcome.handled else _dead_letter(processor, row, error)
            return outcome, noted or undone or {}
        case Failed(unstarted=False):
            return _after_failure(
                processor, row, outcome, attempt=attempt, most=most, undone=undone or {}
            )
    return outcome, {}


def _after_failure(
    processor: Definition[Any],
    row: Model,
    outcome: Failed,
    *,
    attempt: int,
    most: int | None,
    undone: Values,
) -> tuple[Outcome, Values]:
    """Return the outcome and the values for a row that is to be tried again, or given up on."""
    retry, error, model = processor.retry, outcome.error, type(row)
    assert retry is not None
    outcome = replace(outcome, max_attempts=most)
    if retry.gives_up(error, attempt, most):
        dead_letter = _dead_letter(processor, row, error)
        # Without one the row stays pending, and only its attempts show that it is given up.
        last = attempt if dead_letter else max(attempt, most or 0)
        # If nothing shows it, the row is tried again.
        if dead_letter or (most is not None and last >= most):
            tried = replace(outcome, attempt=last)
            noted = retry.given_up(error, last, model)
            if isinstance(error, AttemptsUsedUp) and error.is_known:
                noted.pop(retry.last_error or "", None)  # the row has that of its last attempt
            return tried, {**noted, **dead_letter}
    after = retry.after(error, attempt, model)
    at = retry.next_attempt_at
    again_in = 0.0 if at is None else after[at].delay.total_seconds()
    return replace(outcome, attempt=attempt, again_in=again_in), {**undone, **after}


def _dead_letter(processor: Definition[Any], row: Model, error: Exception) -> Values:
    """Return the values that ``failed`` returns for a row; empty ones leave the row as it is.

    An error in that function does not replace the row's own error: it is logged, and added to the
    row's error as a note.
    """
    alias = row._state.db or DEFAULT_DB_ALIAS  # noqa: SLF001  # documented
    # A query of that function that fails must not take the row's record with it.
    may_query = processor._has_dead_letter and processor.failed is None
    may_query = may_query and connections[alias].in_atomic_block
    try:
        with atomic(using=alias) if may_query else nullcontext():
            values = processor.get_failed(row, error)
        return _checked(processor, row, values)
    except BaseException as second:
        if ends_the_run(second):
            raise
        invalid = isinstance(second, InvalidDone)
        sentence = (
            str(second)
            if invalid
            else f"{_expected(processor)} {type(second).__name__} raised by it: {described(second)}"
        )
        extra = log_fields.fields(processor.name, pk=row.pk, **log_fields.error_fields(second))
        log_fields.log(logger, logging.WARNING, "%s", sentence, extra=extra)
        add_note(error, sentence)
        return {}


def _checked(processor: Definition[Any], row: Model, values: Any) -> Values:
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise InvalidDone(f"{_expected(processor)} {values!r:.100}.")
    check_columns(values, type(row), processor.name, "failed")
    return values


def _expected(processor: Definition[Any]) -> str:
    return (
        f"{processor.name}: expected failed to return a mapping of column names to values, or None "
        "to leave the row as it is, got"
    )


def _snoozed(
    processor: Definition[Any], snoozed: Snoozed, undone: Values | None
) -> tuple[Outcome, Values]:
    if undone is None:
        return Failed(_without(processor, "reset", "Snooze", "claimed")), {}
    retry = processor.retry
    if retry is not None and retry.next_attempt_at is not None:
        return snoozed, {**undone, **retry.snoozed(snoozed.delay, snoozed.until)}
    if snoozed.delay is not None or snoozed.until is not None:
        return Failed(_no_time_kept(processor)), undone
    return snoozed, undone


def _without(processor: Definition[Any], option: str, raised: str, state: str) -> InvalidOption:
    way = "take a row out of pending" if option == "failed" else "put a row back into pending"
    return InvalidOption(
        f"{processor.name}: expected {option}=… for a handler that raises {raised}, got none, so "
        f"the row stays {state}; set {option} to the values that {way}."
    )


def _no_time_kept(processor: Definition[Any]) -> InvalidOption:
    if processor.retry is not None:
        return InvalidOption(
            f"{processor.name}: expected Retry's next_attempt_at to name the column that stores "
            "the time of a Snooze, got a Snooze with a time and next_attempt_at=None; name the "
            "column, or raise Snooze() without a time."
        )
    return InvalidOption(
        f"{processor.name}: expected retry=Retry(…), whose column stores the time of a Snooze, got "
        "a Snooze with a time and no retry; add retry, or raise Snooze() without a time."
    )
