"""Try the flips on one row and roll them back, before any handler is called.

This shows the typing error after which every run would send every mail again. What a flip does to
the other rows is looked at once for each window, when they were handled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

from django.db import Error

from dcl_processor.core.engine import bookkeeping
from dcl_processor.core.engine.rows import Row
from dcl_processor.core.options.options import Definition
from dcl_processor.core.pending.clock import Later
from dcl_processor.core.pending.question import Question
from dcl_processor.core.report.exceptions import InvalidDone, StillPending
from dcl_processor.core.report.values import Values, constants_of, resolve


class Trials(Protocol):
    """The session, as far as a trial needs it."""

    label: str

    def leaves(self, question: Any, pk: Any, writes: Sequence[Values]) -> bool:
        """Write to a row, ask whether it has left ``pending``, and roll back."""


def verify(processor: Definition[Any], session: Trials, question: Question[Any], row: Row) -> None:
    """Raise if a flip leaves the row in ``pending``, or a mark under a lease takes it out.

    In the transaction that has the row locked. A trial that the database refuses proves nothing:
    the handler is called, and its flip decides.
    """
    mark, removed = _mark(processor)
    for option, values in _flips(processor, row):
        writes = [mark] if option == "claim" else [mark, {**removed, **values}]
        leaves = _leaves(session, question, row, writes)
        if option == "claim" and processor.lease is not None:
            if leaves:
                raise InvalidDone(_not_kept(processor, row.pk))
        elif leaves is False:
            raise StillPending(_still_pending(processor, option, values, row.pk))
    _verify_put_back(processor, session, question, row)


def _mark(processor: Definition[Any]) -> tuple[Values, Values]:
    """Return what a claim writes to a row before its handler, and what removes its times."""
    names = [processor.lease.field if processor.lease else None]
    names += [processor.claimed_at] if processor.claim else []
    times = {name: Later(timedelta(hours=1)) for name in names if name}
    return {**(processor.claim or {}), **times}, dict.fromkeys(times)


def _flips(processor: Definition[Any], row: Row) -> Iterator[tuple[str, Values]]:
    if processor.claim:
        yield "claim", processor.claim
    if processor.failed:
        on_failure = (processor.retry.on_failure if processor.retry else None) or {}
        yield "failed", {**on_failure, **processor.failed}
    if processor.repeats or processor._flip_needs_result:
        return
    if processor._has_fixed_flip:
        yield "done", processor.done or {}
    elif processor._writes("get_done"):
        with suppress(InvalidDone):  # of this row alone: its handler is called, and it fails
            yield "done", bookkeeping.given(processor, row.instance)


def _verify_put_back(
    processor: Definition[Any], session: Trials, question: Question[Any], row: Row
) -> None:
    """Raise if what is written to a row that is to be tried again takes it away."""
    mark, removed = _mark(processor)
    reset = (processor.claim and processor.reset) or {}
    on_failure = (processor.retry.on_failure if processor.retry else None) or {}
    for option, given, words, fix in (
        ("reset", reset, "to put a claimed row back into", ""),
        (
            "on_failure",
            on_failure,
            f"to keep row {row.pk} with attempts left in",
            "; include these values in pending, or write them with failed",
        ),
    ):
        writes = [mark, {**reset, **removed, **given}]
        if given and _leaves(session, question, row, writes):
            raise InvalidDone(
                f"{processor.name}: expected {option}={dict(given)!r} {words} pending, got row "
                f"{row.pk} not pending after it; no handler was called{fix}."
            )


def _leaves(
    run: Trials, question: Question[Any], row: Row, writes: Sequence[Values]
) -> bool | None:
    """Return whether the values take the row out of ``pending``; ``None``: it was refused."""
    try:
        return run.leaves(question, row.pk, [resolve(values) for values in writes if values])
    except bookkeeping.UNWRITABLE as error:
        raise bookkeeping.invalid_done(run.label, error) from error
    except Error:
        return None


def _still_pending(processor: Definition[Any], option: str, values: Values, pk: Any) -> str:
    repeats = ", or set repeats=True" if option == "done" else ""
    return (
        f"{processor.name}: expected {option}={dict(values)!r} to take a row out of pending, got "
        f"row {pk} still pending after it, so its handler was not called; make {option} change a "
        f"column that pending tests{repeats}."
    )


def _not_kept(processor: Definition[Any], pk: Any) -> str:
    marks = [f"{name}={value!r}" for name, value in constants_of(processor.claim or {}).items()]
    leased = f"{processor.lease.field}__isnull=False" if processor.lease else ""
    return (
        f"{processor.name}: expected claim={dict(processor.claim or {})!r} to keep row {pk} in "
        "pending under its lease, so that another worker can take it over, got a row that left "
        f"pending; no handler was called; add … | Q({', '.join([*marks, leased])}) to pending."
    )


def left_pending(processor: Definition[Any], pk: Any) -> StillPending:
    """Return the error of a row that is still pending after it was handled."""
    return StillPending(
        f"{processor.name}: expected row {pk} to leave pending once it was handled, got a row "
        "that is still pending; make the handler or done change a column that pending tests, "
        "or set repeats=True."
    )
