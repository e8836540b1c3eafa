"""Stage 3: the handler, and the outcome of each row."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from dcl_processor.exceptions import HandlerExited, Unsupported
from dcl_processor.interrupts import ends_the_run
from dcl_processor.outcomes import Discard, Snooze

if TYPE_CHECKING:
    from dcl_processor.definition.definition import Definition


@dataclass(frozen=True, slots=True)
class Handled:
    """The handler returned; ``result`` is what it returned."""

    result: Any = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The row failed, and its work was rolled back unless it is ``kept``.

    ``kept``: ``process_batch()`` returned the error, and its writes belong to all its rows.
    ``handled``: not the handler failed, but the flip or the commit: after the handler's work, or
    before it if the flip could be rehearsed.
    ``attempt``: with a ``retry``, its number; ``again_in``: seconds until the next one, if any.
    """

    error: Exception
    handled: bool = False
    kept: bool = False
    attempt: int | None = None
    again_in: float | None = None


@dataclass(frozen=True, slots=True)
class Snoozed:
    """The handler raised ``Snooze``: not now."""

    delay: float | timedelta | None = None
    until: datetime | None = None
    kept: bool = False


@dataclass(frozen=True, slots=True)
class Discarded:
    """The handler raised ``Discard``: never."""

    error: Discard
    kept: bool = False


@dataclass(frozen=True, slots=True)
class Lost:
    """The worker had lost the row at its settlement, or before its handler was called."""

    called: bool = True


Outcome = Handled | Failed | Snoozed | Discarded | Lost


def execute(
    processor: Definition[Any],
    row: Any,
    arguments: tuple[Any, ...],
    *,
    is_taken_over: bool = False,
) -> Outcome:
    """Call the handler; any error becomes an outcome, unless it ``ends_the_run()``.

    ``is_taken_over``: the processor's ``taken_over()`` is called first.
    Otherwise a handler that calls ``sys.exit()``, or a library whose errors are no ``Exception``,
    would end every run at the same row.
    """
    try:
        if processor._handles_batches:
            [outcome] = execute_together(processor, [row], arguments)
            return outcome
        if is_taken_over:
            processor.taken_over(row)
        result = processor.process(row, *arguments)
        if result is not None:
            _refuse_coroutine(processor, result)
    except BaseException as error:
        if ends_the_run(error):
            raise
        return judge(error)
    return Handled(result)


def judge(error: BaseException, *, kept: bool = False) -> Outcome:
    """Return the outcome that a handler's exception stands for."""
    match error:
        case Snooze():
            return Snoozed(error.delay, error.until, kept=kept)
        case Discard():
            return Discarded(error, kept=kept)
    return Failed(as_exception(error), kept=kept)


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
    processor: Definition[Any], rows: list[Any], arguments: tuple[Any, ...]
) -> list[Outcome]:
    """Call ``process_batch()``; the caller handles the errors that it raises.

    An exception among its results is the outcome of the row in that place. All writes stay, because
    it is unknown which of them belong to that row. Redoing the other rows without it would repeat
    effects that cannot be rolled back, such as a call of a service.
    """
    results = processor.process_batch(rows, *arguments)
    if results is None:
        return [Handled() for _ in rows]
    if len(results) != len(rows):
        raise Unsupported(
            f"{processor.name}: expected process_batch() to return None or one result for each of "
            f"{len(rows)} rows, got {len(results)}."
        )
    return [
        judge(result, kept=True) if isinstance(result, BaseException) else Handled(result)
        for result in results
    ]


def _refuse_coroutine(processor: Definition[Any], result: Any) -> None:
    if inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result):
        kind = "generator" if inspect.isgenerator(result) else "coroutine"
        getattr(result, "close", bool)()
        raise Unsupported(
            f"{processor.name}: expected the handler to do its work and return, got a {kind} that "
            "is never run; write 'def', and call async code with async_to_sync()."
        )
