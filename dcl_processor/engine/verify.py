"""Try the flips on one row and roll them back, before the first handler of a process is called.

This shows the mistake after which every run would send every mail again.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from django.db import Error

from dcl_processor.engine import bookkeeping
from dcl_processor.engine.rows import Row
from dcl_processor.options.options import Definition
from dcl_processor.pending.clock import Later
from dcl_processor.pending.question import Question
from dcl_processor.report.errors import described
from dcl_processor.report.exceptions import InvalidDone, StillPending
from dcl_processor.report.values import Values, constants_of, resolve
from dcl_processor.sql.errors import is_refusal
from dcl_processor.sql.session import Session


def verify(
    processor: Definition[Any], session: Session, question: Question[Any], row: Row
) -> InvalidDone | None:
    """Raise if a flip leaves the row in ``pending``, or a mark under a lease takes it out.

    In the transaction that has the row locked. Returns the error with which a flip of this row was
    refused, which its handler may change.
    """
    mark, removed = _mark(processor)
    flips, refused = _flips(processor, row)
    processor._identity.unproven.add(question.model)
    for option, values in flips:
        writes = [mark] if option == "claim" else [mark, {**removed, **values}]
        is_constant = option != "done" or processor._has_fixed_flip
        leaves = _leaves(session, question, row, writes, (option, values), is_constant=is_constant)
        if isinstance(leaves, InvalidDone):
            refused = refused or leaves
            continue
        if option == "done" and leaves:
            processor._identity.unproven.discard(question.model)
        if option == "claim" and processor.lease is not None:
            if leaves:
                raise InvalidDone(_not_kept(processor, row.pk))
        elif leaves is False:
            raise StillPending(
                f"{processor.name}: expected {option}={dict(values)!r} to take a row out of "
                f"pending, got row {row.pk} still pending after it, so its handler was not called; "
                f"make {option} change a column that pending tests."
            )
    if (reset := (processor.claim and processor.reset) or {}) and True is _leaves(
        session, question, row, [mark, {**reset, **removed}], ("reset", reset), is_constant=False
    ):
        raise InvalidDone(
            f"{processor.name}: expected reset={dict(reset)!r} to put a claimed row back into "
            f"pending, got row {row.pk} not pending after it; no handler was called."
        )
    processor._identity.verified.add(question.model)
    return refused


def _mark(processor: Definition[Any]) -> tuple[Values, Values]:
    """Return what a claim writes to a row before its handler, and what removes its times."""
    names = [processor.lease.field if processor.lease else None]
    names += [processor.claimed_at] if processor.claim else []
    times = {name: Later(timedelta(hours=1)) for name in names if name}
    return {**(processor.claim or {}), **times}, dict.fromkeys(times)


def _flips(
    processor: Definition[Any], row: Row
) -> tuple[list[tuple[str, Values]], InvalidDone | None]:
    """Return what is tried, and the error of a function that gives no flip for this row alone."""
    tried = [
        (option, values)
        for option, values in (("claim", processor.claim), ("failed", processor.failed))
        if values
    ]
    if processor._has_fixed_flip:
        tried.append(("done", processor.done or {}))
    elif processor._writes("get_done") and not processor._flip_needs_result:
        try:
            tried.append(("done", bookkeeping.given(processor, row.instance)))
        except InvalidDone as error:
            return tried, error
    return tried, None


def _leaves(
    session: Session,
    question: Question[Any],
    row: Row,
    writes: Sequence[Values],
    named: tuple[str, Values],
    *,
    is_constant: bool,
) -> bool | InvalidDone:
    """Return whether the values take the row out of ``pending``, or how that was refused.

    That ends the run if no handler can change it, because the refused values are constants.
    Otherwise the row's own flip decides.
    """
    try:
        return session.leaves(question, row.pk, [resolve(values) for values in writes if values])
    except bookkeeping.UNWRITABLE as error:
        refused = bookkeeping.invalid_done(session.label, error)
        if is_constant:
            raise refused from error
    except Error as error:
        option, refused_values = named
        refused = InvalidDone(
            f"{session.label}: expected the database to accept "
            f"{option}={dict(refused_values)!r:.200} for row {row.pk}, got {described(error)!r}; "
            "change the values, the constraint or the right; no handler was called."
        )
        if is_constant and is_refusal(error):
            raise refused from error
    return refused


def _not_kept(processor: Definition[Any], pk: Any) -> str:
    marks = [f"{name}={value!r}" for name, value in constants_of(processor.claim or {}).items()]
    leased = f"{processor.lease.field}__isnull=False" if processor.lease else ""
    return (
        f"{processor.name}: expected claim={dict(processor.claim or {})!r} to keep row {pk} in "
        "pending under its lease, so that another worker can take it over, got a row that left "
        f"pending; no handler was called; add … | Q({', '.join([*marks, leased])}) to pending."
    )
