"""Stage 4: write the outcomes, in the transaction that holds the rows' locks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from django.core.exceptions import FieldError
from django.db.models import QuerySet

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
        case Snoozed():
            return _snoozed(processor, outcome, undone)
        case Failed(error) if retry is None:
            # What is claimed and cannot be put back is known to have failed, and says so.
            return outcome, processor.get_failed(row, error) if undone is None else {}
        case Failed(error):
            assert retry is not None
            if retry.gives_up(error, attempt):
                dead_letter = processor.get_failed(row, error)
                # Without one the row stays pending, and only its attempts say that it is over.
                last = attempt if dead_letter else max(attempt, retry.max_attempts)
                return outcome, {**retry.given_up(error, last, model), **dead_letter}
            return outcome, {**(undone or {}), **retry.after(error, attempt, model)}
    return outcome, {}


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


def _snoozed(
    processor: BatchProcessor[Any], snoozed: Snoozed, undone: Values | None
) -> tuple[Outcome, Values]:
    if undone is None:
        return Failed(_no_way_back(processor)), {}
    if processor.retry is not None:
        return snoozed, {**undone, **processor.retry.snoozed(snoozed.delay, snoozed.until)}
    if snoozed.delay is not None or snoozed.until is not None:
        return Failed(_no_time_kept(processor)), undone
    return snoozed, undone


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


def _no_time_kept(processor: BatchProcessor[Any]) -> InvalidOption:
    return InvalidOption(
        f"{processor.name}: expected retry=Retry(…), whose column keeps until when a row is "
        "snoozed, got Snooze with a time and no retry; raise Snooze() without one, or add retry."
    )
