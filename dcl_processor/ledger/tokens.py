"""The ``rate`` of a processor: how many rows may start in a second, on all machines together.

Time is divided into windows, by the database's clock: one second long, or long enough for one row
if the rate is below 1. Each window has so many tokens, one for a row. A run takes as many as it is
likely to need in the window, by one statement, and tokens that it does not use are lost with the
window. So there is no statement for each row, and never more rows than the rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dcl_processor.ledger.models import RUN_WAIT, controls, ensure, waiting
from dcl_processor.ledger.switch import quietly
from dcl_processor.operator.times import utc
from dcl_processor.pending import steady as time
from dcl_processor.pending.clock import DatabaseNow
from dcl_processor.report.observer import EndRun

#: Seconds for which a run waits for a token; then it ends.
PATIENCE = 10.0

#: Tries to take tokens while other workers take some, too.
TRIES = 10


@dataclass(frozen=True, slots=True)
class Grant:
    """So many tokens, which are valid for ``seconds``; without any, it is the time to wait."""

    tokens: int
    seconds: float


def take(name: str, rate: float, wanted: int) -> Grant:
    """Take up to ``wanted`` tokens of the window that it is now."""
    # Seconds of a window, and its tokens. If these are not a whole number, some windows have one
    # more, and all together the rate.
    length, each = max(1.0, 1 / rate), max(1.0, rate)

    def before(number: int) -> int:
        """Return the tokens of all windows since 1970 before one."""
        return math.floor(number * each)

    for _ in range(TRIES):
        with waiting(RUN_WAIT):
            found = _read(name)
            if found is None:
                ensure(name, RUN_WAIT)
                continue
            now, window, used = found
            number = math.floor(now / length)
            # Another window is over, is one of another rate, or by a clock that went back.
            spent = used if window == number else 0
            free = before(number + 1) - before(number) - spent
            if free <= 0:
                return Grant(0, (number + 1) * length - now)
            tokens = min(wanted, free)
            # Race: over the rate. Another worker may have taken tokens since they were read: then
            # this statement finds no row, and the tokens are read again, by a new transaction.
            taken = controls().filter(processor=name, window=window, used=used)
            if taken.update(window=number, used=spent + tokens):
                return Grant(tokens, (number + 1) * length - now)
    return Grant(0, 0.1)


def _read(name: str) -> tuple[float, int, int] | None:
    row = controls().filter(processor=name).annotate(clock=DatabaseNow())
    found = row.values_list("clock", "window", "used").first()
    return None if found is None else (utc(found[0]).timestamp(), found[1], found[2])


class Tokens:
    """The tokens that one run has. While the ledger does not answer, no row starts."""

    def __init__(self, name: str, rate: float) -> None:
        self._name, self._rate = name, rate
        self._left = 0
        self._valid_until = self._held_until = 0.0
        #: Since when rows have waited for one.
        self._waiting_since: float | None = None
        #: Rows that used a token in this window, and in the last one.
        self._used = self._used_before = 0

    def take(self, wanted: int) -> int:
        """Return how many of so many rows may start; end the run if none may for long."""
        now = time.monotonic()
        if now >= self._valid_until:
            self._left = 0
            self._used_before, self._used = self._used, 0
        if self._left < wanted and now >= self._held_until:
            self._get(wanted, now)
        taken = min(wanted, self._left)
        self._left -= taken
        self._used += taken
        if taken:
            self._waiting_since = None
            return taken
        self._waiting_since = now if self._waiting_since is None else self._waiting_since
        if max(now, self._held_until) - self._waiting_since > PATIENCE:
            raise EndRun("throttled")
        return 0

    def _get(self, wanted: int, now: float) -> None:
        """Get tokens: as many as in the last window, and twice as many if these are used up.

        ``now``: from before the question, as a late answer is not to make the window longer.
        """
        enough = max(wanted - self._left, self._used_before, self._used)
        grant = quietly(lambda: take(self._name, self._rate, enough), Grant(0, 1.0))
        if grant.tokens or not self._left:
            self._valid_until = now + grant.seconds
        self._left += grant.tokens
        if grant.tokens < enough:
            self._held_until = now + grant.seconds
