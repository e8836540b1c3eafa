"""The values that are written to a row: its flip, or what records its failure."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from django.core.exceptions import FieldDoesNotExist, FieldError, ValidationError
from django.db import DEFAULT_DB_ALIAS, connections
from django.db.models import Model, QuerySet
from django.db.transaction import atomic
from django.utils import timezone

from dcl_processor.engine.rows import Row
from dcl_processor.options.model_columns import check_columns
from dcl_processor.options.options import Definition
from dcl_processor.report.errors import add_note, described, raise_interrupt
from dcl_processor.report.exceptions import (
    AttemptsUsedUp,
    InvalidDone,
    InvalidOption,
    ProcessorError,
)
from dcl_processor.report.log import log
from dcl_processor.report.outcomes import Discarded, Failed, Outcome, Snoozed
from dcl_processor.report.values import Values, is_constant, resolve

#: The errors of a flip from which Django cannot build a statement.
UNWRITABLE = (FieldError, FieldDoesNotExist, ValidationError, TypeError, ValueError, OverflowError)


def invalid_done(label: str, error: BaseException) -> InvalidDone:
    """Return the error for a flip from which Django cannot build a statement."""
    return InvalidDone(
        f"{label}: expected done to give columns values that they can hold, got {described(error)}"
    )


def fixed_flip(processor: Definition[Any]) -> Values | None:
    """Return the flip if it is the same for all rows; ``None``: it depends on the row."""
    done = processor.done if processor._has_fixed_flip else None
    if done is None or any(callable(each) and each is not timezone.now for each in done.values()):
        return None
    return with_cleared_retry(processor, done)


def likeness(values: Values) -> Any:
    """Return a key that is equal for values that are written alike."""
    try:
        key = tuple((name, type(value), repr(value), value) for name, value in values.items())
        hash(key)
    except Exception:  # noqa: BLE001  # no hash(), or none that works
        return id(values)
    is_known = all(is_constant(each) or each is timezone.now for each in values.values())
    return key if is_known else id(values)


def refuse_moved(processor: Definition[Any], row: Row, table: QuerySet[Any, Any]) -> None:
    """Raise if the handler has moved the row to another key, under which it is still pending."""
    key = row.instance.pk
    # A copy of a row has another key, too, but the original row still exists.
    if table.filter(pk=key).exists() and not table.filter(pk=row.pk).exists():
        raise ProcessorError(
            f"{processor.name}: expected the handler not to change its row's primary key, got row "
            f"{row.pk} with the key {key}; change another column, or create a new row."
        )


def flip(processor: Definition[Any], row: Model, result: Any) -> Values:
    """Return the values that take a handled row out of pending, or raise ``InvalidDone``."""
    values = given(processor, row, *([result] if processor._flip_needs_result else []))
    return resolve(with_cleared_retry(processor, values))


def with_cleared_retry(processor: Definition[Any], values: Values) -> Values:
    """Add the values that the retry columns of a row without failures contain.

    A row may become pending again. Failures and claims from before its success would then use up
    its attempts. The user's own values for these columns win.
    """
    return values if processor.retry is None else {**processor.retry.untried_values(), **values}


def given(processor: Definition[Any], row: Model, *arguments: Any) -> Values:
    """Return what ``done`` gives for a row; ``arguments``: the result, if it takes that."""
    if processor._has_fixed_flip:
        return processor.done or {}  # checked before the run
    return _returned(processor, row, "done", partial(processor.get_done, row, *arguments))


def _returned(
    processor: Definition[Any], row: Model, option: str, call: Callable[[], Any]
) -> Values:
    """Return the values that a function of the user's gives for a row; raises ``InvalidDone``."""
    example = {"sent" if option == "done" else "given_up": True}
    expected = (
        f"{processor.name}: expected {option} to return a mapping of column names to values, such "
        f"as {example}, got"
    )
    try:
        values = call()
    except BaseException as error:  # of the user's function
        raise_interrupt(error)
        words = f"{expected} {type(error).__name__} raised by it: {described(error)}"
        raise InvalidDone(words) from error
    if not isinstance(values, Mapping):
        raise InvalidDone(f"{expected} {values!r:.100}.")
    check_columns(values, type(row), processor.name, option)
    return {**values}  # the function may use the mapping again, for the next row


# --- of a row that was not handled


def notes(
    processor: Definition[Any],
    row: Row,
    outcome: Outcome,
    undone: Values | None = MappingProxyType({}),
) -> tuple[Outcome, Values]:
    """Return the outcome to report for a row that was not handled, and the values to write to it.

    ``undone``: the values that restore the row as it was before its claim; ``None``: it cannot be
    restored.
    """
    retry, instance, attempt = processor.retry, row.instance, row.attempt
    model = type(instance)
    match outcome:
        case Discarded(error):
            values = _dead_letter(processor, instance, error)
            if values:
                noted: Values = retry.given_up(error, attempt, model) if retry else {}
                return outcome, {**noted, **values}
            if not processor._has_dead_letter:
                error = _without(processor, "failed", "Discard", "pending")
            # The attempt counts, as that of a handler that discards its row does.
            tried = retry.after(error, attempt, model) if retry else {}
            return Failed(error), tried
        case Snoozed():
            return _snoozed(processor, outcome, undone)
        case Failed(error) if retry is None:
            # The first failure is the last. A flip that could not be written gives no row up: the
            # cause is mostly a mistake in ``done``, which affects all rows.
            noted = {} if outcome.handled else _dead_letter(processor, instance, error)
            return outcome, noted or undone or {}
        case Failed(unstarted=False):
            return _after_failure(processor, row, outcome, undone or {})
    return outcome, {}


def _after_failure(
    processor: Definition[Any], row: Row, outcome: Failed, undone: Values
) -> tuple[Outcome, Values]:
    """Return the outcome and the values for a row that is to be tried again, or given up on."""
    retry, error, model = processor.retry, outcome.error, type(row.instance)
    assert retry is not None
    # The claim of a row without attempts counted one more, for which no handler was called.
    was_used_up = isinstance(error, AttemptsUsedUp)
    most = retry.max_attempts
    attempt = most or row.attempt if was_used_up else row.attempt
    outcome = replace(outcome, attempt=attempt, max_attempts=most)
    if retry.gives_up(error, attempt):
        dead_letter = _dead_letter(processor, row.instance, error)
        # Without one the row stays pending, and only its attempts show that it is given up.
        last = attempt if dead_letter else max(attempt, most or 0)
        # If nothing shows it, the row is tried again.
        if dead_letter or most is not None:
            noted = retry.given_up(error, last, model)
            if was_used_up and not (processor.lease and row.before.get(processor.lease.field)):
                noted.pop(retry.last_error or "", None)  # the row has that of its last attempt
            return replace(outcome, attempt=last), {**noted, **dead_letter}
    after = retry.after(error, attempt, model)
    at = retry.next_attempt_at
    again_in = 0.0 if at is None else after[at].delay.total_seconds()
    return replace(outcome, again_in=again_in), {**undone, **after}


def _dead_letter(processor: Definition[Any], row: Model, error: Exception) -> Values:
    """Return the values that ``failed`` returns for a row; empty ones leave the row as it is.

    An error in that function does not replace the row's own error: it is logged, and added to the
    row's error as a note.
    """
    alias = row._state.db or DEFAULT_DB_ALIAS  # noqa: SLF001  # documented
    call = lambda: processor.get_failed(row, error) or {}  # noqa: E731
    # A query of that function that fails must not take the row's record with it.
    may_query = processor._writes("get_failed") and connections[alias].in_atomic_block
    try:
        with atomic(using=alias) if may_query else nullcontext():
            return _returned(processor, row, "failed", call)
    except InvalidDone as invalid:
        log(logging.WARNING, "%s", str(invalid))
        add_note(error, str(invalid))
        return {}


def _snoozed(
    processor: Definition[Any], snoozed: Snoozed, undone: Values | None
) -> tuple[Outcome, Values]:
    if undone is None:
        return Failed(_without(processor, "reset", "Snooze", "claimed")), {}
    retry = processor.retry
    if retry is not None and retry.next_attempt_at is not None:
        return snoozed, {**undone, **retry.snoozed(snoozed.delay, snoozed.until)}
    if snoozed.delay is not None or snoozed.until is not None:
        error = InvalidOption(
            f"{processor.name}: expected a Retry with next_attempt_at, the column for the time of "
            "a Snooze, got a Snooze with a time and no such column; name the column, or raise "
            "Snooze() without a time."
        )
        return Failed(error), undone
    return snoozed, undone


def _without(processor: Definition[Any], option: str, raised: str, state: str) -> InvalidOption:
    return InvalidOption(
        f"{processor.name}: expected {option}=… for a handler that raises {raised}, got none, so "
        f"the row stays {state}; add {option}."
    )


def in_plain_text(processor: Definition[Any], values: Values) -> Values:
    """Return the values with an error in ASCII; empty: it was so."""
    name = (processor.retry and processor.retry.last_error) or ""
    text = values.get(name)
    if not isinstance(text, str) or text.isascii():
        return {}
    return {**values, name: text.encode("ascii", "replace").decode()}


PLAIN = (
    "%s: the failure of row %s was recorded with a plain text, because the database refused it: %s"
)
