"""What a handler raises or returns to choose another outcome than success or failure."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, ClassVar

from django.db import DatabaseError

from dcl_processor.report.exceptions import HandlerExited, InvalidDone, InvalidOption, StillPending
from dcl_processor.report.values import TEN_YEARS, expect_seconds, expect_type


class Snooze(Exception):
    """Raised by a handler for "not now": the row's work is rolled back and it stays pending.

    This is an outcome, not a failure, and uses up no attempt. ``delay``: seconds (or a
    ``timedelta``) before the row is tried again; ``until``: the time from which it may be tried.
    Either needs the processor's ``retry``, whose column keeps the time. With neither, the row waits
    for the ``retry``'s ``backoff``, or without a ``retry`` for the next run.
    """

    def __init__(
        self,
        reason: str = "",
        *,
        delay: float | timedelta | None = None,
        until: datetime | None = None,
    ) -> None:
        super().__init__(reason)
        if delay is not None and until is not None:
            raise InvalidOption(
                f"expected a Snooze with delay or until, got both: {delay!r} and {until!r}."
            )
        if delay is not None:
            expect_seconds("expected a Snooze's delay", delay, most=TEN_YEARS)
        if until is not None:
            expect_type("expected a Snooze's until", until, datetime, "a datetime")
        self.delay = delay
        self.until = until


class Discard(Exception):
    """Raised by a handler for "never".

    The row's work is rolled back, and the processor's ``failed`` is written to it.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)


def returned_error(result: Any) -> BaseException | None:
    """Return the exception that user code has returned, or whose class it has returned.

    "return Snooze()" is one word away from "raise Snooze()". Taken for a result, it would flip the
    row without its work.
    """
    if isinstance(result, type) and issubclass(result, BaseException):
        result = result()
    return result if isinstance(result, BaseException) else None


# --- what the engine makes of a row: ``name`` is that of its count in the report, and ``called``
# whether its handler was called in this run


@dataclass(frozen=True, slots=True)
class Handled:
    """The handler returned; ``result`` is what it returned."""

    name: ClassVar[str] = "processed"
    kept: ClassVar[bool] = True
    called: ClassVar[bool] = True

    result: Any = None
    duration: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Failed:
    """The row failed, and its work was rolled back unless it is ``kept``.

    ``handled``: not the handler failed, but the flip or the commit. ``unstarted``: no handler was
    called, and no attempt is counted. ``attempt``, ``max_attempts``, ``again_in``: as in the
    report.
    """

    name: ClassVar[str] = "failed"
    called: ClassVar[bool] = True

    error: Exception
    handled: bool = False
    kept: bool = False
    unstarted: bool = False
    attempt: int | None = None
    max_attempts: int | None = None
    again_in: float | None = None
    duration: float | None = field(default=None, compare=False)

    @property
    def is_refused(self) -> bool:
        """Whether the handler returned, and the flip could not be written."""
        kinds = (StillPending, InvalidDone, DatabaseError)
        return self.handled and isinstance(self.error, kinds)


@dataclass(frozen=True, slots=True)
class Snoozed:
    """``Snooze``: not now."""

    name: ClassVar[str] = "snoozed"
    called: ClassVar[bool] = True

    delay: float | timedelta | None = None
    until: datetime | None = None
    kept: bool = False
    duration: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Discarded:
    """``Discard``: never."""

    name: ClassVar[str] = "discarded"
    called: ClassVar[bool] = True

    error: Discard
    kept: bool = False
    duration: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Lost:
    """The worker had lost the row at its settlement, or before its handler was called."""

    name: ClassVar[str] = "lease_lost"
    kept: ClassVar[bool] = False
    duration: ClassVar[None] = None

    called: bool = True


Outcome = Handled | Failed | Snoozed | Discarded | Lost


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
    """Return the error, or an ``Exception`` in place of an error that is none."""
    if isinstance(error, Exception):
        return error
    exited = HandlerExited(error)
    exited.__cause__ = error
    return exited
