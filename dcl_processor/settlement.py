"""Stage 4: write the outcome, in the transaction that holds the row's lock."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from django.core.exceptions import FieldError
from django.db import connections, transaction
from django.db.models import Model, QuerySet

from .exceptions import InvalidDone, ProcessorError, StillPending
from .execution import Failed, Handled
from .pending import Question

if TYPE_CHECKING:
    from .definition import BatchProcessor


def settle(
    processor: BatchProcessor[Any],
    question: Question[Any],
    pk: Any,
    row: Any,
    outcome: Handled | Failed,
) -> Handled | Failed:
    """Flip a row that was handled; roll back one that failed, here or before."""
    if isinstance(outcome, Handled):
        try:
            _flip(processor, question, pk, row, outcome.result)
        except Exception as error:  # noqa: BLE001  # the work is done, the flip is not
            outcome = Failed(error, handled=True)
    if isinstance(outcome, Failed):
        transaction.set_rollback(True, using=question.using)
    else:
        _keep_callbacks_apart(question.using)
    return outcome


def rehearse(processor: BatchProcessor[Any], question: Question[Any], pk: Any) -> None:
    """Flip, ask, roll back: raise ``StillPending`` before any handler ran, not after."""
    done = processor.done or {}
    with transaction.atomic(using=question.using):
        _write(question, pk, done, processor.name)
        still = question.of(pk).exists()
        transaction.set_rollback(True, using=question.using)
    if still:
        raise StillPending(
            f"{processor.name}: expected done={dict(done)!r} to take a row out of pending, got "
            f"row {pk} still pending after it; no handler was called. Make done change what "
            "pending asks for, or say repeats=True."
        )


def check_columns(values: Mapping[str, Any], model: type[Model], label: str) -> None:
    """Raise ``InvalidDone`` unless every name is a column of the model that a flip may write."""
    columns = {name: f for f in model._meta.concrete_fields for name in (f.name, f.attname)}
    for name in values:
        if name not in columns:
            raise InvalidDone(
                f"{label}: expected done to name columns of {model._meta.label}, got {name!r}; "
                f"the columns are {', '.join(f.name for f in model._meta.concrete_fields)}."
            )
        if columns[name].primary_key or columns[name].generated:
            raise InvalidDone(
                f"{label}: expected done to name columns that a flip may write, got {name!r}, "
                f"which is {'the primary key' if columns[name].primary_key else 'generated'}."
            )


def _flip(
    processor: BatchProcessor[Any], question: Question[Any], pk: Any, row: Any, result: Any
) -> None:
    values = processor.get_done(row, result)
    if values:
        _write(question, pk, values, processor.name)
    if processor._has_fixed_flip or processor.repeats:
        return
    # The handler or its result decided the flip, so it could not be rehearsed beforehand.
    if question.of(pk).exists():
        raise StillPending(
            f"{processor.name}: expected row {pk} to leave pending once it was handled, got a row "
            "that is still pending; make the handler or done change what pending asks for, or "
            "say repeats=True."
        )


def _write(question: Question[Any], pk: Any, values: Mapping[str, Any], label: str) -> None:
    """Write these columns and nothing else, by primary key.

    Never ``save()``, which would write back columns that somebody else has changed since. The
    key is the one that was claimed: a handler that deletes or copies its row changes ``row.pk``.
    """
    table: QuerySet[Any] = QuerySet(question.model, using=question.using).filter(pk=pk)
    resolved = {name: value() if callable(value) else value for name, value in values.items()}
    try:
        written = table.update(**resolved)
    except FieldError as error:
        raise InvalidDone(f"{label}: expected done to name columns, got: {error}") from error
    # Looked up, not guessed: a row that the handler deleted has left pending all right.
    if not written and table.exists():
        raise ProcessorError(
            f"{label}: expected the flip to write row {pk}, got 0 rows written although it is "
            "there; look for a trigger, a rule or row-level security that drops the update."
        )


def _keep_callbacks_apart(using: str) -> None:
    """Make the on_commit() callbacks robust, as ``on_commit(robust=True)`` does.

    The row is settled when they run. One that raises would make Django drop those behind it,
    and look like a commit that failed; Django logs it instead.
    """
    connection: Any = connections[using]  # the stubs know the callbacks as pairs
    connection.run_on_commit = [(sids, call, True) for sids, call, _ in connection.run_on_commit]
