"""Stage 3: the handler, and the outcome of each row."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from dcl_processor.exceptions import Discard, Snooze, Unsupported

if TYPE_CHECKING:
    from dcl_processor.definition.definition import Definition


@dataclass(frozen=True, slots=True)
class Handled:
    """The handler returned; ``result`` is what it returned."""

    result: Any = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The row failed, and its work was rolled back.

    ``handled``: the handler did its work, and it was the flip or the commit that failed.
    """

    error: Exception
    handled: bool = False


@dataclass(frozen=True, slots=True)
class Snoozed:
    """The handler said "not now"."""

    delay: float | timedelta | None = None
    until: datetime | None = None


@dataclass(frozen=True, slots=True)
class Discarded:
    """The handler said "never"."""

    error: Discard


@dataclass(frozen=True, slots=True)
class Lost:
    """The row was not ours any more when it was to be handled or settled."""


Outcome = Handled | Failed | Snoozed | Discarded | Lost


def execute(processor: Definition[Any], row: Any, arguments: tuple[Any, ...]) -> Outcome:
    """Call the handler; whatever exception it raises becomes an outcome here.

    ``KeyboardInterrupt`` and ``SystemExit`` are nobody's failure and go through, and so does what
    ``ends_the_run()``.
    """
    try:
        if processor._handles_batches:
            [handled] = execute_together(processor, [row], arguments)
            return handled
        result = processor.process(row, *arguments)
        _refuse_coroutine(processor, result)
    except Exception as error:
        if ends_the_run(error):
            raise
        return judge(error)
    return Handled(result)


def ends_the_run(error: BaseException) -> bool:
    """Tell whether the run's time is up, which is no row's failure, whichever was at hand.

    Celery's soft time limit is an ``Exception``, raised wherever its signal finds the process.
    Known by its name: whoever has raised it has imported Celery, and nobody else needs to.
    """
    kinds = {(kind.__module__, kind.__name__) for kind in type(error).__mro__}
    return ("billiard.exceptions", "SoftTimeLimitExceeded") in kinds


def judge(error: Exception) -> Outcome:
    """Return the outcome that a handler's exception stands for."""
    match error:
        case Snooze():
            return Snoozed(error.delay, error.until)
        case Discard():
            return Discarded(error)
    return Failed(error)


def execute_together(
    processor: Definition[Any], rows: list[Any], arguments: tuple[Any, ...]
) -> list[Handled]:
    """Call ``process_batch()``; what it raises is for the caller, who knows how to go on."""
    results = processor.process_batch(rows, *arguments)
    if results is None:
        return [Handled() for _ in rows]
    if len(results) != len(rows):
        raise Unsupported(
            f"{processor.name}: expected process_batch() to return None or one result for each of "
            f"{len(rows)} rows, got {len(results)}."
        )
    return [Handled(result) for result in results]


def _refuse_coroutine(processor: Definition[Any], result: Any) -> None:
    if result is None:
        return
    if inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result):
        kind = "generator" if inspect.isgenerator(result) else "coroutine"
        getattr(result, "close", bool)()
        raise Unsupported(
            f"{processor.name}: expected the handler to do its work and return, got a {kind} that "
            "nobody runs; write 'def', and call async code with async_to_sync()."
        )
