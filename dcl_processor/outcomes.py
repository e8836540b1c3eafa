"""What a handler raises or returns to choose another outcome than success or failure."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from .exceptions import InvalidOption
from .values import TEN_YEARS, expect_seconds, expect_type


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
        try:
            return result()
        except Exception as error:  # noqa: BLE001  # it needs arguments
            return error
    return result if isinstance(result, BaseException) else None
