"""Stage 3: the handler, and the outcome of each row."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sized
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from dcl_processor.exceptions import HandlerExited, ProcessorError, Unsupported
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
    ``unstarted``: no handler was called, and no attempt is counted.
    ``attempt``: its number, if a ``retry`` counts it; ``max_attempts``: how many the row has, if
    there is a limit; ``again_in``: seconds until the next one, if any.
    """

    error: Exception
    handled: bool = False
    kept: bool = False
    unstarted: bool = False
    attempt: int | None = None
    max_attempts: int | None = None
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


@dataclass(frozen=True, slots=True)
class HandedOut:
    """The row was handed out: it is handled elsewhere, and settled by its reservation."""


@dataclass(frozen=True, slots=True)
class UsedUp:
    """The row had no attempts left, as only its claim could show; no handler was called."""


Outcome = Handled | Failed | Snoozed | Discarded | Lost | HandedOut | UsedUp

#: What a call for several rows came to: the outcome of each, by key, or, if the call raised, one
#: outcome for the call as a whole.
Together = dict[Any, Outcome] | Outcome


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
            [outcome] = execute_together(processor, {row.pk: row}, arguments).values()
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
    processor: Definition[Any], rows: Mapping[Any, Any], arguments: tuple[Any, ...]
) -> dict[Any, Outcome]:
    """Call ``process_batch()``; the caller handles the errors that it raises."""
    given = [*rows.values()]
    results = processor.process_batch(given, *arguments)
    return outcomes_of(processor, rows, results)


def attempt_together(
    processor: Definition[Any], rows: Mapping[Any, Any], arguments: tuple[Any, ...]
) -> Together:
    """Call ``process_batch()``; any error becomes an outcome, unless it ``ends_the_run()``."""
    try:
        results = processor.process_batch([*rows.values()], *arguments)
    except BaseException as error:
        if ends_the_run(error):
            raise
        return judge(error)
    return understood(processor, rows, results)


def understood(processor: Definition[Any], rows: Iterable[Any], results: Any) -> Together:
    """Return the outcomes of rows from what ``process_batch()`` returned.

    If that cannot be understood, the work may be done all the same, for any of the rows.
    """
    try:
        return outcomes_of(processor, rows, results)
    except BaseException as error:
        if ends_the_run(error):
            raise
        return Failed(as_exception(error), handled=True)


def outcomes_of(
    processor: Definition[Any], rows: Iterable[Any], results: Any
) -> dict[Any, Outcome]:
    """Return the outcome of each row, by key, from what ``process_batch()`` returned.

    ``rows``: the keys in the order in which the rows were passed. ``results``: ``None``, a result
    for each row in that order, or results by key. An exception among them is the outcome of its
    row. All writes stay, because it is unknown which of them belong to that row. Redoing the other
    rows without it would repeat effects that cannot be rolled back, such as a call of a service.
    Raises ``Unsupported`` for anything else.
    """
    keys = [*rows]
    if results is None:
        return {pk: Handled() for pk in keys}
    if isinstance(results, Mapping):
        return _by_key(processor, keys, results)
    _refuse_coroutine(processor, results)
    if not _is_one_per_row(results):
        raise Unsupported(
            f"{processor.name}: expected process_batch() to return None, a list with one result "
            f"for each row, or a mapping of primary keys to results, got {results!r:.100}."
        )
    if len(results) != len(keys):
        raise Unsupported(
            f"{processor.name}: expected process_batch() to return None or one result for each of "
            f"{len(keys)} rows, got {len(results)}."
        )
    return {pk: _returned(result) for pk, result in zip(keys, results, strict=True)}


def _by_key(
    processor: Definition[Any], keys: list[Any], results: Mapping[Any, Any]
) -> dict[Any, Outcome]:
    """Return the outcomes from results by key; a row without a result has failed."""
    known = set(keys)
    for key in results:
        if key not in known:
            raise Unsupported(
                f"{processor.name}: expected process_batch() to return a mapping whose keys are "
                f"primary keys of the rows that it was called with, such as {keys[0]!r}, got the "
                f"key {key!r}; use row.pk as the key."
            )
    return {pk: _returned(results[pk]) if pk in results else _no_result(pk) for pk in keys}


def _returned(result: Any) -> Outcome:
    return judge(result, kept=True) if isinstance(result, BaseException) else Handled(result)


def _no_result(pk: Any) -> Outcome:
    # Handled as far as is known: AT_MOST_ONCE must not repeat it, and leaves the row in doubt.
    return Failed(
        ProcessorError(
            f"expected a result for row {pk} in the mapping that process_batch() returned, got no "
            "such key, so it is unknown whether the row was handled; return an entry for each row, "
            "None if there is nothing to say."
        ),
        handled=True,
        kept=True,
    )


def _is_one_per_row(results: Any) -> bool:
    """Return whether the results have an order and a length, as lists have."""
    return (
        isinstance(results, Sized)
        and isinstance(results, Iterable)
        and not isinstance(results, str | bytes | AbstractSet)
    )


def _refuse_coroutine(processor: Definition[Any], result: Any) -> None:
    if inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result):
        kind = "generator" if inspect.isgenerator(result) else "coroutine"
        getattr(result, "close", bool)()
        raise Unsupported(
            f"{processor.name}: expected the handler to do its work and return, got a {kind} that "
            "is never run; write 'def', and call async code with async_to_sync()."
        )
