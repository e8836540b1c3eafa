"""When a row that failed is tried again, and what its columns contain then."""

from __future__ import annotations

import random
from dataclasses import KW_ONLY, dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Model, Q

from dcl_processor.pending.clock import DatabaseNow, Later
from dcl_processor.report import values
from dcl_processor.report.errors import describe, masked, printable

#: Characters of an error that ``last_error`` keeps.
LONGEST_ERROR = 2_000

#: Seconds. A longer delay would mean to give up, and no clock overflows.
LONGEST_DELAY = values.TEN_YEARS

_Errors = type[BaseException] | tuple[type[BaseException], ...]

_COLUMNS = ("attempts", "next_attempt_at", "last_error")


@dataclass(frozen=True, slots=True)
class Retry:
    """Try a failed row again in a later run, with growing delays, and give up in the end.

    ``max_attempts``: handler calls for one row, including the first; ``None``: no limit.
    ``backoff``: seconds (or a ``timedelta``) before the second attempt, doubled before each further
    one up to ``max_delay``; each delay is longer or shorter by a random part up to ``jitter`` of
    it. ``on``: the errors that are worth another attempt; ``give_up_on``: the errors among these
    that are not.
    ``attempts``, ``next_attempt_at`` and ``last_error`` name columns of the model: an integer, a
    nullable date and time, and a text; the last two may be ``None``. Without ``next_attempt_at`` a
    failed row is due again in the next run.

    A success clears the three columns. A row that is given up on gets the processor's ``failed``.
    The names and the exponential backoff are those of tenacity and of Celery's ``autoretry_for``.
    """

    max_attempts: int | None = 5
    _: KW_ONLY
    backoff: float | timedelta = 30
    max_delay: float | timedelta = 3600
    jitter: float = 0.1
    on: _Errors = Exception
    give_up_on: _Errors = ()
    attempts: str = "attempts"
    next_attempt_at: str | None = "next_attempt_at"
    last_error: str | None = "last_error"

    def __post_init__(self) -> None:
        named = "expected Retry's"
        for name in ("backoff", "max_delay"):
            values.expect_seconds(f"{named} {name}", getattr(self, name), most=LONGEST_DELAY)
        fits = values.is_number(self.jitter) and 0 <= self.jitter <= 1
        values.expect(fits, f"{named} jitter", "a number from 0 to 1", self.jitter)
        for name in ("on", "give_up_on"):
            errors, words = getattr(self, name), "an exception class or a tuple of them"
            kinds = errors if isinstance(errors, tuple) else (errors,)
            fits = all(isinstance(each, type) and issubclass(each, BaseException) for each in kinds)
            values.expect(fits, f"{named} {name}", words, errors)
        values.expect_type(f"{named} attempts", self.attempts, str, "the name of a column")
        for name in _COLUMNS[1:]:
            words = "the name of a column, or None"
            values.expect_type(f"{named} {name}", getattr(self, name), str | None, words)
        if self.max_attempts is not None:
            values.expect_whole_number(
                f"{named} max_attempts", self.max_attempts, of="attempts", least=1, fix="; or None"
            )

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of those of the three columns that the model has."""
        return tuple(filter(None, (getattr(self, name) for name in _COLUMNS)))

    def due(self) -> Q | None:
        """Return the condition under which a row may be tried now; ``None``: always."""
        at = self.next_attempt_at
        if at is None:
            return None
        return Q(**{f"{at}__isnull": True}) | Q(**{f"{at}__lte": DatabaseNow()})

    def has_attempts_left(self, model: type[Model]) -> Q | None:
        """Return the condition under which a row has attempts left; ``None``: always."""
        if self.max_attempts is None:
            return None
        left = Q(**{f"{self.attempts}__lt": self.max_attempts})
        # NULL is no attempt so far. Plain conditions of the row's own columns, unlike a function
        # such as COALESCE, can be checked by the statement that locks.
        is_nullable = model._meta.get_field(self.attempts).null
        return left | Q(**{f"{self.attempts}__isnull": True}) if is_nullable else left

    def gives_up(self, error: BaseException, attempt: int) -> bool:
        """Return whether this attempt, counted from 1, was the last."""
        worth_it = isinstance(error, self.on) and not isinstance(error, self.give_up_on)
        return (self.max_attempts is not None and attempt >= self.max_attempts) or not worth_it

    def after(self, error: BaseException, attempt: int, model: type[Model]) -> dict[str, Any]:
        """Return the columns' values after a failed attempt that is not the last."""
        written = self.given_up(error, attempt, model)
        if self.next_attempt_at is not None:
            written[self.next_attempt_at] = self.time_after(attempt)
        return written

    def given_up(self, error: BaseException, attempt: int, model: type[Model]) -> dict[str, Any]:
        """Return the columns' values after the last attempt."""
        written: dict[str, Any] = {self.attempts: attempt}
        if self.next_attempt_at is not None:
            written[self.next_attempt_at] = None
        if self.last_error is not None:
            longest = getattr(model._meta.get_field(self.last_error), "max_length", None)
            written[self.last_error] = _text(error, longest)
        return written

    def snoozed(self, delay: float | timedelta | None, until: datetime | None) -> dict[str, Any]:
        """Return the columns' values for a row that is not to be tried before then."""
        assert self.next_attempt_at is not None
        if until is not None:
            return {self.next_attempt_at: until}
        wait = self.backoff if delay is None else delay
        return {self.next_attempt_at: Later(values.as_timedelta(wait))}

    def untried_values(self) -> dict[str, Any]:
        """Return the columns' values for a row that was never tried."""
        untried = {self.attempts: 0, self.next_attempt_at: None, self.last_error: ""}
        return {name: value for name, value in untried.items() if name is not None}

    def time_after(self, attempt: int) -> Later:
        """Return the time of the attempt after this one, by the database's clock."""
        longest = values.seconds(self.max_delay)
        # The exponent is bounded first, because 2 ** 10,000 seconds does not fit a float.
        doubled = values.seconds(self.backoff) * 2 ** min(attempt - 1, 60)
        spread = random.uniform(1 - self.jitter, 1 + self.jitter)  # noqa: S311  # no secret
        delay = min(min(doubled, longest) * spread, longest)
        return Later(timedelta(seconds=delay))


def _text(error: BaseException, longest: int | None) -> str:
    # PostgreSQL's text cannot contain NUL, and UTF-8 cannot encode half of a surrogate pair.
    said = f"{type(error).__name__}: {masked(describe(error))}".replace("\0", "")
    said = printable(said.encode("utf-8", "replace").decode())
    return said[: min(longest or LONGEST_ERROR, LONGEST_ERROR)]
