"""Stage 4: write the outcomes, in the transaction that holds the rows' locks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from django.core.exceptions import FieldError
from django.db import transaction
from django.db.models import DateTimeField, Model, QuerySet

from .exceptions import InvalidDone, InvalidOption, ProcessorError, StillPending
from .execution import Discarded, Failed, Outcome, Snoozed
from .pending import Question, these

if TYPE_CHECKING:
    from .batch import Batch
    from .definition import BatchProcessor

Values = Mapping[str, Any]


def notes(
    batch: Batch[Any], pk: Any, outcome: Outcome, *, undone: Values | None = MappingProxyType({})
) -> tuple[Outcome, Values]:
    """Return what a row that was not handled is to say of it, and the outcome to report.

    ``undone``: what puts the row back as it was before its claim; ``None``: nothing can.
    """
    processor, row, model = batch.processor, batch.rows[pk], batch.question.model
    retry, attempt = processor.retry, batch.attempts.get(pk, 0)
    match outcome:
        case Discarded(error):
            values = processor.get_failed(row, error)
            if not values:
                return Failed(_no_dead_letter(processor)), {}
            return outcome, {**(retry.given_up(error, attempt, model) if retry else {}), **values}
        case Snoozed() if undone is None:
            return Failed(_no_way_back(processor)), {}
        case Snoozed(delay, until):
            wait = retry.snoozed(delay, until) if retry else {}
            return outcome, {**(undone or {}), **wait}
        case Failed(error) if retry is None:
            # What is claimed and cannot be put back is known to have failed, and says so.
            return outcome, processor.get_failed(row, error) if undone is None else {}
        case Failed(error):
            assert retry is not None
            if retry.gives_up(error, attempt):
                given_up = retry.given_up(error, attempt, model)
                return outcome, {**given_up, **processor.get_failed(row, error)}
            return outcome, {**(undone or {}), **retry.after(error, attempt, model)}
    return outcome, {}


def rehearse(processor: BatchProcessor[Any], question: Question[Any], pk: Any) -> None:
    """Flip, ask, roll back: raise ``StillPending`` before any handler ran, not after."""
    claim = dict(processor.claim or {})
    flips = {"claim": claim, "failed": {**claim, **(processor.failed or {})}}
    if processor._has_fixed_flip and not processor.repeats:
        flips["done"] = {**claim, **(processor.done or {})}
    for option, values in flips.items():
        if getattr(processor, option) and _rehearsed(question, pk, values, processor.name):
            raise StillPending(_still_pending(processor, option, pk))
    back = {**claim, **(processor.reset or {})}
    if claim and processor.reset and not _rehearsed(question, pk, back, processor.name):
        raise InvalidDone(
            f"{processor.name}: expected reset={dict(processor.reset)!r} to put a claimed row "
            f"back into pending, got row {pk} not pending after it; no handler was called."
        )


def _rehearsed(question: Question[Any], pk: Any, values: Values, label: str) -> bool:
    with transaction.atomic(using=question.using):
        write(question, [pk], values, label)
        still = question.still_pending([pk]).exists()
        transaction.set_rollback(True, using=question.using)
    return still


def _still_pending(processor: BatchProcessor[Any], option: str, pk: Any) -> str:
    values = dict(getattr(processor, option))
    repeats = ", or say repeats=True" if option == "done" else ""
    return (
        f"{processor.name}: expected {option}={values!r} to take a row out of pending, got row "
        f"{pk} still pending after it; no handler was called. Make {option} change what pending "
        f"asks for{repeats}."
    )


def check(processor: BatchProcessor[Any], model: type[Model], using: str) -> None:
    """Raise unless the model has the columns that the processor would write."""
    for option in ("done", "failed", "reset", "claim"):
        check_columns(getattr(processor, option) or {}, model, processor.name, option)
    if processor.claimed_at is not None:
        _check_claimed_at(processor, processor.claimed_at, model)
    if processor.retry is not None:
        processor.retry.check(model, processor.name)
    if processor.lease is not None:
        processor.lease.check(model, using, processor.name)


def _check_claimed_at(processor: BatchProcessor[Any], name: str, model: type[Model]) -> None:
    columns = {field.name: field for field in model._meta.concrete_fields}
    if not isinstance(columns.get(name), DateTimeField) or not columns[name].null:
        raise InvalidOption(
            f"{processor.name}: expected claimed_at={name!r} to name a nullable DateTimeField of "
            f"{model._meta.label}, got {type(columns[name]).__name__ if name in columns else None}."
        )


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


def group(flips: Mapping[Any, Values]) -> list[tuple[Values, list[Any]]]:
    """Group rows by the values of their flips: one statement writes a group."""
    groups: list[tuple[Values, list[Any]]] = []
    for pk, values in flips.items():
        for known, pks in groups:
            if known is values or known == values:
                pks.append(pk)
                break
        else:
            groups.append((values, [pk]))
    return groups


def refuse_pending(
    processor: BatchProcessor[Any], question: Question[Any], pks: Sequence[Any]
) -> None:
    """Raise ``StillPending`` if one of the rows is."""
    for pk in question.still_pending(pks).values_list("pk", flat=True)[:1]:
        raise StillPending(
            f"{processor.name}: expected row {pk} to leave pending once it was handled, got a row "
            "that is still pending; make the handler or done change what pending asks for, or "
            "say repeats=True."
        )


def resolve(values: Values) -> dict[str, Any]:
    """Call those of the values that are callables, as ``update_or_create()`` does."""
    return {name: value() if callable(value) else value for name, value in values.items()}


def write(question: Question[Any], pks: Sequence[Any], values: Values, label: str) -> None:
    """Write these columns and nothing else, by primary key.

    Never ``save()``, which would write back columns that somebody else has changed since. The
    keys are those that were claimed: a handler that deletes or copies its row changes ``row.pk``.
    """
    if not values:
        return
    table: QuerySet[Any] = QuerySet(question.model, using=question.using)
    rows = table.filter(these(pks))
    try:
        written = rows.update(**resolve(values))
    except FieldError as error:
        raise InvalidDone(f"{label}: expected done to name columns, got: {error}") from error
    # Looked up, not guessed: rows that the handler deleted have left pending all right.
    if written < len(pks) and rows.count() > written:
        raise ProcessorError(
            f"{label}: expected the flip to write {_named(pks)}, got {written} of {len(pks)} rows "
            "written although they are there; look for a trigger, a rule or row-level security "
            "that drops the update."
        )


def _named(pks: Sequence[Any]) -> str:
    return f"row {pks[0]}" if len(pks) == 1 else f"rows {', '.join(map(str, pks[:5]))} and others"


def _no_dead_letter(processor: BatchProcessor[Any]) -> InvalidOption:
    return InvalidOption(
        f"{processor.name}: expected failed=… to say what is written to a row that the handler "
        "discards, got Discard without it; the row stays pending."
    )


def _no_way_back(processor: BatchProcessor[Any]) -> InvalidOption:
    return InvalidOption(
        f"{processor.name}: expected reset=… to say what puts a claimed row back, got Snooze "
        "without it; the row stays claimed."
    )
