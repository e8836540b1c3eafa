"""The flips, tried on one row and taken back, before any handler is called."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

from django.db import transaction

from dcl_processor import clock
from dcl_processor.candidates.pending import Question
from dcl_processor.definition.kinds import Delivery
from dcl_processor.exceptions import InvalidDone, InvalidOption, StillPending

from . import writing
from .writing import Values

if TYPE_CHECKING:
    from dcl_processor.definition.definition import Definition


def rehearse(processor: Definition[Any], question: Question[Any], pk: Any) -> None:
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
    _check_kept(processor, question, pk)


def _check_kept(processor: Definition[Any], question: Question[Any], pk: Any) -> None:
    """Raise unless the columns give back what is written: whoever settles a row looks for that."""
    constants, times = _marks(processor, question, pk)
    if not constants and not times:
        return
    table = question.table
    with transaction.atomic(using=question.using):
        writing.write(question, [pk], {**constants, **times}, processor.name)
        kept = table.filter(pk=pk).values(*constants, *times).get()
        # As whoever settles the row will ask: what is equal is for the database to say.
        lost = [n for n, v in constants.items() if not table.filter(pk=pk, **{n: v}).exists()]
        # A field that cuts a time off on its way in would be equal, and the same for all copies.
        lost += [name for name, time in times.items() if kept[name] != time]
        transaction.set_rollback(True, using=question.using)
    for name in lost:
        what = "microseconds" if name in times else repr(constants[name])
        mend = "make it one with six digits" if name in times else "claim another value"
        raise InvalidOption(
            f"{processor.name}: expected {question.model._meta.label}.{name} to keep {what}, by "
            f"which a claimed row is recognised, got {kept[name]} back; {mend}."
        )


def _marks(
    processor: Definition[Any], question: Question[Any], pk: Any
) -> tuple[dict[str, Any], dict[str, datetime]]:
    """Return what marks a claimed row: the constants, and the columns that take a time."""
    constants: dict[str, Any] = {}
    if processor.delivery == Delivery.AT_MOST_ONCE:
        constants = {
            name: value
            for name, value in (processor.claim or processor.done or {}).items()
            if not callable(value) and not hasattr(value, "resolve_expression")
        }
    columns = [processor.claimed_at, processor.lease.field if processor.lease else None]
    if not any(columns):
        return constants, {}
    # No digit is 0, whatever the time is.
    now = clock.read(question.table, [pk])
    assert now is not None  # the row is locked, so it is there
    return constants, {name: now.replace(microsecond=654_321) for name in columns if name}


def _rehearsed(question: Question[Any], pk: Any, values: Values, label: str) -> bool:
    with transaction.atomic(using=question.using):
        writing.write(question, [pk], values, label)
        still = question.still_pending([pk]).exists()
        transaction.set_rollback(True, using=question.using)
    return still


def _still_pending(processor: Definition[Any], option: str, pk: Any) -> str:
    values = dict(getattr(processor, option))
    repeats = ", or say repeats=True" if option == "done" else ""
    return (
        f"{processor.name}: expected {option}={values!r} to take a row out of pending, got row "
        f"{pk} still pending after it; no handler was called. Make {option} change what pending "
        f"asks for{repeats}."
    )
