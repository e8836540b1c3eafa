"""When a row that failed is tried again, and what its columns contain then."""

from __future__ import annotations

import random
from dataclasses import KW_ONLY, dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db.models import CharField, DateTimeField, IntegerField, Model, Q, TextField

from dcl_processor import values
from dcl_processor.clock import DatabaseNow, Later
from dcl_processor.errors import describe

from .model_columns import expect_column

#: Characters of an error that ``last_error`` keeps.
LONGEST_ERROR = 2_000

#: Seconds. A longer delay would mean to give up, and no clock overflows.
LONGEST_DELAY = values.TEN_YEARS

_Errors = type[BaseException] | tuple[type[BaseException], ...]


@dataclass(frozen=True, slots=True)
class Retry:
    """Try a failed row again in a later run, with growing delays, and give up in the end.

    ``max_attempts``: handler calls for one row, including the first. ``backoff``: seconds (or a
    ``timedelta``) before the second attempt, doubled before each further one up to ``max_delay``;
    each delay is longer or shorter by a random part up to ``jitter`` of it. ``on``: the errors
    that are worth another attempt; ``give_up_on``: the errors among these that are not.
    ``attempts``, ``next_attempt_at`` and ``last_error`` name columns of the model: an integer, a
    nullable date and time, and a text.

    A success clears the three columns. A row that is given up on gets the processor's ``failed``.
    The names and the exponential backoff are those of tenacity and of Celery's ``autoretry_for``.
    """

    max_attempts: int = 5
    _: KW_ONLY
    backoff: float | timedelta = 30
    max_delay: float | timedelta = 3600
    jitter: float = 0.1
    on: _Errors = Exception
    give_up_on: _Errors = ()
    attempts: str = "attempts"
    next_attempt_at: str = "next_attempt_at"
    last_error: str = "last_error"

    def __post_init__(self) -> None:
        named = "expected Retry's"
        values.expect_whole_number(
            f"{named} max_attempts", self.max_attempts, of="attempts", least=1
        )
        for name in ("backoff", "max_delay"):
            values.expect_seconds(f"{named} {name}", getattr(self, name), most=LONGEST_DELAY)
        fits = values.is_number(self.jitter) and 0 <= self.jitter <= 1
        values.expect(fits, f"{named} jitter", "a number from 0 to 1", self.jitter)
        for name in ("on", "give_up_on"):
            errors = getattr(self, name)
            words = "an exception class or a tuple of them"
            values.expect(_are_errors(errors), f"{named} {name}", words, errors)
        for name in ("attempts", "next_attempt_at", "last_error"):
            values.expect_type(f"{named} {name}", getattr(self, name), str, "the name of a column")

    @property
    def columns(self) -> tuple[str, str, str]:
        return self.attempts, self.next_attempt_at, self.last_error

    def check(self, model: type[Model], label: str) -> None:
        """Raise ``InvalidOption`` unless the model has columns of the right kind."""
        for option, kind, null, words in (
            ("attempts", IntegerField, False, "an integer column that cannot be NULL"),
            ("next_attempt_at", DateTimeField, True, "a nullable date and time column"),
            ("last_error", (CharField, TextField), None, "a text column"),
        ):
            name = getattr(self, option)
            named = f"{label}: expected Retry's {option}={name!r}"
            expect_column(model, name, kind, null=null, named=named, words=words)

    def due(self) -> Q:
        """Return the condition under which a row may be tried now."""
        at = self.next_attempt_at
        return Q(**{f"{at}__isnull": True}) | Q(**{f"{at}__lte": DatabaseNow()})

    def not_used_up(self) -> Q:
        """Return the condition under which a row has attempts left."""
        return Q(**{f"{self.attempts}__lt": self.max_attempts})

    def gives_up(self, error: BaseException, attempt: int) -> bool:
        """Return whether this attempt, counted from 1, was the last."""
        worth_it = isinstance(error, self.on) and not isinstance(error, self.give_up_on)
        return attempt >= self.max_attempts or not worth_it

    def after(self, error: BaseException, attempt: int, model: type[Model]) -> dict[str, Any]:
        """Return the columns' values after a failed attempt that is not the last."""
        return {**self.given_up(error, attempt, model), self.next_attempt_at: self.in_(attempt)}

    def given_up(self, error: BaseException, attempt: int, model: type[Model]) -> dict[str, Any]:
        """Return the columns' values after the last attempt."""
        said = _text(error, _length(model, self.last_error))
        return {self.attempts: attempt, self.next_attempt_at: None, self.last_error: said}

    def snoozed(self, delay: float | timedelta | None, until: datetime | None) -> dict[str, Any]:
        """Return the columns' values for a row that is not to be tried before then."""
        if until is not None:
            return {self.next_attempt_at: until}
        wait = self.backoff if delay is None else delay
        return {self.next_attempt_at: Later(values.as_timedelta(wait))}

    def fresh(self) -> dict[str, Any]:
        """Return the columns' values for a row that was never tried."""
        return {self.attempts: 0, self.next_attempt_at: None, self.last_error: ""}

    def in_(self, attempt: int) -> Later:
        """Return the time of the attempt after this one, by the database's clock."""
        longest = values.seconds(self.max_delay)
        # The exponent is bounded first, because 2 ** 10,000 seconds does not fit a float.
        doubled = values.seconds(self.backoff) * 2 ** min(attempt - 1, 60)
        spread = random.uniform(1 - self.jitter, 1 + self.jitter)  # noqa: S311  # no secret
        delay = min(min(doubled, longest) * spread, longest)
        return Later(timedelta(seconds=delay))


def _length(model: type[Model], name: str) -> int | None:
    longest: int | None = getattr(model._meta.get_field(name), "max_length", None)
    return longest


def _text(error: BaseException, longest: int | None) -> str:
    # PostgreSQL's text cannot contain NUL, and UTF-8 cannot encode half of a surrogate pair.
    said = f"{type(error).__name__}: {describe(error)}".replace("\0", "")
    said = said.encode("utf-8", "replace").decode()
    return said[: min(longest or LONGEST_ERROR, LONGEST_ERROR)]


def _are_errors(errors: Any) -> bool:
    kinds = errors if isinstance(errors, tuple) else (errors,)
    return all(isinstance(kind, type) and issubclass(kind, BaseException) for kind in kinds)
