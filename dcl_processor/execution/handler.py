"""Stage 3: the handler, and the outcome of each row."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sized
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from dcl_processor import observers
from dcl_processor.exceptions import HandlerExited, Unsupported
from dcl_processor.interrupts import ends_the_run
from dcl_processor.outcomes import Discard, Snooze, returned_error
from dcl_processor.signals import row_started

from .calls import Call, announced, noted

if TYPE_CHECKING:
    from dcl_processor.definition.definition import Definition

    from .time_limit import TimeLimit


@dataclass(frozen=True, slots=True)
class Handled:
    """The handler returned; ``result`` is what it returned; ``duration``: seconds of its call."""

    result: Any = None
    duration: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Failed:
    """The row failed, and its work was rolled back unless it is ``kept``.

    ``kept``: ``process_batch()`` returned the error, and its writes belong to all its rows.
    ``handled``: not the handler failed, but the flip or the commit: after the handler's work, or
    before it if the flip could be rehearsed.
    ``unstarted``: no handler was called, and no attempt is counted.
    ``refused``: the flip was, or it left the row pending. ``result``: what the handler returned.
    ``attempt``: its number, if a ``retry`` counts it; ``max_attempts``: how many the row has, if
    there is a limit; ``again_in``: seconds until the next one, if any. ``duration``: seconds that
    the handler's call took, if there was one.
    """

    error: Exception
    handled: bool = False
    refused: bool = False
    result: Any = None
    kept: bool = False
    unstarted: bool = False
    attempt: int | None = None
    max_attempts: int | None = None
    again_in: float | None = None
    duration: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Snoozed:
    """``Snooze``: not now. ``kept``, ``duration``: as for ``Failed``."""

    delay: float | timedelta | None = None
    until: datetime | None = None
    kept: bool = False
    duration: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Discarded:
    """``Discard``: never. ``kept``, ``duration``: as for ``Failed``."""

    error: Discard
    kept: bool = False
    duration: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Lost:
    """The worker had lost the row at its settlement, or before its handler was called."""

    called: bool = True


@dataclass(frozen=True, slots=True)
class HandedOut:
    """The row was handed out: it is handled elsewhere, and settled by its reservation."""


Outcome = Handled | Failed | Snoozed | Discarded | Lost | HandedOut

#: What a call for several rows came to: the outcome of each, by key, or, if the call raised, one
#: outcome for the call as a whole.
Together = dict[Any, Outcome] | Outcome


def execute(
    processor: Definition[Any],
    row: Any,
    arguments: tuple[Any, ...],
    *,
    limit: TimeLimit | None = None,
    attempt: int | None = None,
) -> Outcome:
    """Call the handler; any error becomes an outcome, unless it ``ends_the_run()``.

    ``limit``: of each call. ``attempt``: its number, if one is counted.
    Otherwise a handler that calls ``sys.exit()``, or a library whose errors are no ``Exception``,
    would end every run at the same row.
    """
    call = Call(processor.name, (row.pk,), limit, attempt)
    try:
        if processor._handles_batches:
            [outcome] = execute_together(processor, {row.pk: row}, arguments, limit).values()
            return outcome
        if observers.active or row_started.receivers:
            result = announced(processor, call, limit, processor.process, row, *arguments)
        else:
            result = noted(call, limit, processor.process, row, *arguments)
    except BaseException as error:
        if ends_the_run(error):
            raise
        return judge(error, duration=call.duration)
    # Most results are None, and a call for each row is saved.
    return Handled(None, call.duration) if result is None else returned(result, call.duration)


def judge(
    error: BaseException, *, kept: bool = False, duration: float | None = None
) -> Snoozed | Discarded | Failed:
    """Return the outcome that a handler's exception stands for."""
    match error:
        case Snooze():
            return Snoozed(error.delay, error.until, kept=kept, duration=duration)
        case Discard():
            return Discarded(error, kept=kept, duration=duration)
    return Failed(as_exception(error), kept=kept, duration=duration)


def as_exception(error: BaseException) -> Exception:
    """Return the error, or an ``Exception`` in place of an error that is none.

    ``Retry(on=Exception)``, and a caller that raises the row's error again, expect an
    ``Exception``. The error that ended the handler must not end them as well.
    """
    if isinstance(error, Exception):
        return error
    exited = HandlerExited(error)
    exited.__cause__ = error
    return exited


def execute_together(
    processor: Definition[Any],
    rows: Mapping[Any, Any],
    arguments: tuple[Any, ...],
    limit: TimeLimit | None = None,
) -> dict[Any, Outcome]:
    """Call ``process_batch()``; the caller handles the errors that it raises."""
    call, given = Call(processor.name, [*rows], limit), [*rows.values()]
    results = announced(processor, call, limit, processor.process_batch, given, *arguments)
    if (error := returned_error(results)) is not None:
        # An object that a module keeps for all its calls would collect their tracebacks.
        raise error.with_traceback(None)
    return outcomes_of(processor, rows, results, call.duration)


def attempt_together(
    processor: Definition[Any],
    rows: Mapping[Any, Any],
    arguments: tuple[Any, ...],
    limit: TimeLimit | None = None,
) -> Together:
    """Call ``process_batch()``; any error becomes an outcome, unless it ``ends_the_run()``."""
    call, given = Call(processor.name, [*rows], limit), [*rows.values()]
    try:
        results = announced(processor, call, limit, processor.process_batch, given, *arguments)
    except BaseException as error:
        if ends_the_run(error):
            raise
        return judge(error, duration=call.duration)
    if (raised := returned_error(results)) is not None:
        return judge(raised, duration=call.duration)
    try:
        return outcomes_of(processor, rows, results, call.duration)
    except BaseException as error:
        if ends_the_run(error):
            raise
        # The work may be done all the same, for any of the rows.
        return Failed(as_exception(error), handled=True, duration=call.duration)


def outcomes_of(
    processor: Definition[Any], rows: Iterable[Any], results: Any, duration: float | None
) -> dict[Any, Outcome]:
    """Return the outcome of each row, by key, from what ``process_batch()`` returned.

    ``rows``: the keys in the order in which the rows were passed. ``results``: ``None``, or a
    result for each row in that order. An exception among them is the outcome of its row. All writes
    stay, because it is unknown which of them belong to that row. Redoing the other rows without it
    would repeat effects that cannot be rolled back, such as a call of a service. Raises
    ``Unsupported`` for anything else.
    """
    keys = [*rows]
    if results is None:
        return {pk: Handled(None, duration) for pk in keys}
    _refuse_coroutine(results)
    # They need an order and a length, as lists have.
    has_no_order = isinstance(results, str | bytes | AbstractSet | Mapping)
    if has_no_order or not isinstance(results, Sized) or not isinstance(results, Iterable):
        raise Unsupported(
            f"{processor.name}: expected process_batch() to return None, or a list with one result "
            f"for each row, got {results!r:.100}."
        )
    if len(results) != len(keys):
        raise Unsupported(
            f"{processor.name}: expected process_batch() to return None or one result for each of "
            f"{len(keys)} rows, got {len(results)}; return the results in the order of the rows."
        )
    return {
        pk: returned(result, duration, kept=True) for pk, result in zip(keys, results, strict=True)
    }


def returned(result: Any, duration: float | None, *, kept: bool = False) -> Outcome:
    """Return the outcome that a row's result stands for; a returned exception is as one raised."""
    if result is None:
        return Handled(None, duration)
    try:
        if (error := returned_error(result)) is None:
            _refuse_coroutine(result)
    except Unsupported as refused:
        error = refused
    except BaseException as raised:  # by an object that stands for another one
        if ends_the_run(raised):
            raise
        return Failed(as_exception(raised), handled=True, kept=kept, duration=duration)
    return (
        Handled(result, duration) if error is None else judge(error, kept=kept, duration=duration)
    )


def _refuse_coroutine(result: Any) -> None:
    if inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result):
        kind = "generator" if inspect.isgenerator(result) else "coroutine"
        fix = "iterate over it" if kind == "generator" else "await it, or use async_to_sync()"
        getattr(result, "close", bool)()
        raise Unsupported(
            f"expected the handler to do its work and return, got a {kind} that is never run; "
            f"{fix}."
        )
