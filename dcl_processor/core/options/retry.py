"""When a row that failed is tried again, and what its columns contain then."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from datetime import datetime, timedelta
from typing import Any

from django.db.models import F, Model, Q

from dcl_processor.core.pending.clock import DatabaseNow, Later
from dcl_processor.core.report import values
from dcl_processor.core.report.errors import describe, described, masked, printable
from dcl_processor.core.report.exceptions import InvalidDone, InvalidOption
from dcl_processor.core.report.interrupts import ends_the_run

#: Characters of an error that ``last_error`` keeps.
LONGEST_ERROR = 2_000

#: Seconds. A longer delay would mean to give up, and no clock overflows.
LONGEST_DELAY = values.TEN_YEARS

_Errors = type[BaseException] | tuple[type[BaseException], ...]

_COLUMNS = ("attempts", "next_attempt_at", "last_error")


@dataclass(frozen=True, slots=True)
class Retry:
    """Try a failed row again in a later run, with growing delays, and give up in the end.

    ``max_attempts``: handler calls for one row, including the first; the name of a column with that
    number, or a function of the row that returns it; ``None``: no limit. ``backoff``: seconds (or a
    ``timedelta``) before the second attempt, doubled before each further one up to ``max_delay``;
    each delay is longer or shorter by a random part up to ``jitter`` of it. ``on``: the errors
    that are worth another attempt; ``give_up_on``: the errors among these that are not.
    ``on_failure``: values that are written at every failure.
    ``attempts``, ``next_attempt_at`` and ``last_error`` name columns of the model: an integer, a
    nullable date and time, and a text; each may be ``None``. Without ``next_attempt_at`` a failed
    row is due again in the next run. Without ``attempts`` no attempts are counted: each delay is
    ``backoff``, and a function for ``max_attempts`` returns how many attempts are left.

    A success clears the three columns. A row that is given up on gets the processor's ``failed``.
    The names and the exponential backoff are those of tenacity and of Celery's ``autoretry_for``.
    """

    max_attempts: int | str | Callable[[Any], int | None] | None = 5
    _: KW_ONLY
    backoff: float | timedelta = 30
    max_delay: float | timedelta = 3600
    jitter: float = 0.1
    on: _Errors = Exception
    give_up_on: _Errors = ()
    on_failure: Mapping[str, Any] | None = field(default=None, hash=False)
    attempts: str | None = "attempts"
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
        for name in _COLUMNS:
            words = "the name of a column, or None"
            values.expect_type(f"{named} {name}", getattr(self, name), str | None, words)
        self._check_max_attempts()
        self._check_on_failure()

    def _check_max_attempts(self) -> None:
        most, named = self.max_attempts, "expected Retry's max_attempts"
        if callable(most):
            fits = _takes_one(most)
            values.expect(fits, named, "a function of the row, which takes one argument", most)
        elif most is not None and self.attempts is None:
            raise InvalidOption(
                f"{named} to be None, or a function of the row, with attempts=None, got {most!r}: "
                "without a column no attempts are counted; name the column, or use "
                "max_attempts=None, with which no row runs out of attempts."
            )
        elif isinstance(most, str):
            fits = most != "" and most not in self.columns
            words = "the name of a column other than attempts, next_attempt_at and last_error"
            values.expect(fits, named, words, most)
        elif most is not None:
            fix = "; or use the name of a column, a function of the row, or None"
            values.expect_whole_number(named, most, of="attempts", least=1, fix=fix)

    def _check_on_failure(self) -> None:
        given: Any = self.on_failure
        if given is None:
            return
        fits = isinstance(given, Mapping) and all(isinstance(name, str) for name in given)
        if not fits or not given:
            raise InvalidDone(
                "expected Retry's on_failure to be a mapping of column names to values, such as "
                f"{{'status': 'deferred'}}, got {given!r}."
            )
        for name in self.columns:
            if name in given:
                raise InvalidDone(
                    "expected Retry's on_failure to name columns other than "
                    f"{', '.join(self.columns)}, got {name!r}, to which a failure writes a value "
                    "of its own; leave it out, or pass None for that column of Retry."
                )

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of those of the three columns that the model has."""
        return tuple(filter(None, (getattr(self, name) for name in _COLUMNS)))

    @property
    def bounds_attempts(self) -> bool:
        """Whether a row runs out of attempts also if its handler never ends."""
        return self.max_attempts is not None and self.attempts is not None

    def due(self) -> Q | None:
        """Return the condition under which a row may be tried now; ``None``: always."""
        at = self.next_attempt_at
        if at is None:
            return None
        return Q(**{f"{at}__isnull": True}) | Q(**{f"{at}__lte": DatabaseNow()})

    def has_attempts_left(self, model: type[Model]) -> Q | None:
        """Return the condition under which a row has attempts left; ``None``: no column tells."""
        if self.attempts is None or self.max_attempts is None or callable(self.max_attempts):
            return None
        by_column = isinstance(self.max_attempts, str)
        most = F(self.max_attempts) if isinstance(self.max_attempts, str) else self.max_attempts
        left = Q(**{f"{self.attempts}__lt": most})
        for name in (self.attempts, self.max_attempts if by_column else None):
            # NULL is no attempt so far, or no limit. Plain conditions of the row's own columns,
            # unlike a function such as COALESCE, can be checked by the statement that locks.
            if isinstance(name, str) and model._meta.get_field(name).null:
                left |= Q(**{f"{name}__isnull": True})
        return left

    def limit(self, row: Any) -> int | None:
        """Return the number of attempts that a function of the row gives it; ``None``: no limit.

        Raises ``InvalidOption`` if the function raises, or returns anything else.
        """
        assert callable(self.max_attempts)
        named = "expected Retry's max_attempts to return a whole number, or None for no limit, got"
        try:
            most: Any = self.max_attempts(row)
        except BaseException as error:
            if ends_the_run(error):
                raise
            raised = f"{type(error).__name__} raised by it: {described(error)}"
            raise InvalidOption(f"{named} {raised}") from error
        if most is None or (isinstance(most, int) and values.is_number(most)):
            number: int | None = most
            return number
        raise InvalidOption(f"{named} {most!r:.100}.")

    def gives_up(self, error: BaseException, attempt: int, most: int | None) -> bool:
        """Return whether this attempt, counted from 1, was the last; ``most``: the row's limit."""
        worth_it = isinstance(error, self.on) and not isinstance(error, self.give_up_on)
        return (most is not None and attempt >= most) or not worth_it

    def after(self, error: BaseException, attempt: int, model: type[Model]) -> dict[str, Any]:
        """Return the columns' values after a failed attempt that is not the last."""
        written = self.given_up(error, attempt, model)
        if self.next_attempt_at is not None:
            written[self.next_attempt_at] = self.time_after(attempt)
        return written

    def given_up(self, error: BaseException, attempt: int, model: type[Model]) -> dict[str, Any]:
        """Return the columns' values after the last attempt."""
        written: dict[str, Any] = {}
        if self.attempts is not None:
            written[self.attempts] = attempt
        if self.next_attempt_at is not None:
            written[self.next_attempt_at] = None
        if self.last_error is not None:
            written[self.last_error] = _text(error, _length(model, self.last_error))
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


def _length(model: type[Model], name: str) -> int | None:
    longest: int | None = getattr(model._meta.get_field(name), "max_length", None)
    return longest


def _text(error: BaseException, longest: int | None) -> str:
    # PostgreSQL's text cannot contain NUL, and UTF-8 cannot encode half of a surrogate pair.
    said = f"{type(error).__name__}: {masked(describe(error))}".replace("\0", "")
    said = printable(said.encode("utf-8", "replace").decode())
    return said[: min(longest or LONGEST_ERROR, LONGEST_ERROR)]


def _takes_one(function: Any) -> bool:
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return False
    except ValueError:  # some builtins have no signature
        return True
    return True
