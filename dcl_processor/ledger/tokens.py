"""The ``rate`` of a processor: how many rows may start in a second, on all machines together.

Time is divided into windows, by the database's clock: one second long, or long enough for one row
if the rate is below 1. Each window has so many tokens, one for a row. A worker takes as many as it
is likely to need in the window, by one statement, and tokens that it does not use are lost with the
window. So there is no statement for each row, and never more rows than the rate. Rows that are
handled together may take more tokens than a window has: the next windows pay, whichever run comes
then, because the debt is in the table, too.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass

from dcl_processor.operator.times import utc
from dcl_processor.oversight import Hold
from dcl_processor.pending import steady as time
from dcl_processor.pending.clock import DatabaseNow

from .desk import UnreachableError
from .models import ensure, row_of

#: Seconds without a question after one that got no answer; a run does not wait for so long.
WITHOUT_AN_ANSWER = 15.0

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
        found = _read(name)
        if found is None:
            ensure(name)
            continue
        now, window, used = found
        number = math.floor(now / length)
        # Another window is over, is one of another rate, or by a clock that went back.
        spent = used if window == number else 0
        free = before(number + 1) - before(number) - spent
        if free <= 0:
            return Grant(0, (number + 1) * length - now)
        tokens = min(wanted, free)
        # Race: over the rate. Another worker may have taken tokens since they were read: then this
        # statement finds no row, and the tokens are read again.
        taken = row_of(name).filter(window=window, used=used)
        if taken.update(window=number, used=spent + tokens):
            return Grant(tokens, (number + 1) * length - now)
    return Grant(0, 0.1)


def _read(name: str) -> tuple[float, int, int] | None:
    row = row_of(name).annotate(clock=DatabaseNow()).values_list("clock", "window", "used").first()
    if row is None:  # emptied in this moment
        return None
    return utc(row[0]).timestamp(), row[1], row[2]


class Tokens:
    """The tokens of a processor in this process, whose runs share them, also one after another.

    ``ask`` calls the function ``take()`` at the ledger. While that cannot be asked, no row starts.
    """

    def __init__(self, ask: Callable[[int], Grant]) -> None:
        self._ask = ask
        self._lock = threading.Lock()
        #: The number of this window, among those of the process.
        self.window = 0
        self._tokens = 0
        self._valid_until = 0.0
        self._held_until = 0.0
        #: Rows that used a token in this window, and in the last one.
        self._used = 0
        self._used_before = 0

    def hold(self) -> Hold | None:
        """Return until when no row may start; ``None``: it is worth asking."""
        now = time.monotonic()
        if now >= self._held_until or (self._tokens > 0 and now < self._valid_until):
            return None
        return Hold("throttled", self._held_until - now)

    def take(self, wanted: int) -> tuple[int, int]:
        """Return how many of so many rows may start, and the number of the window."""
        with self._lock:
            if time.monotonic() >= self._valid_until:
                self._begin_window()
            if self._tokens < wanted:
                self._get(wanted)
            taken = min(wanted, self._tokens)
            self._tokens -= taken
            self._used += taken
            return taken, self.window

    def give_back(self, rows: int, window: int) -> None:
        """Take back the tokens of rows that were not started; ``window``: in which they were got.

        Those of an earlier window are lost: a later one has no more tokens than it was granted.
        """
        with self._lock:
            if window == self.window:
                self._tokens += rows
                self._used -= rows

    def _begin_window(self) -> None:
        self.window += 1
        self._tokens = 0
        self._used_before, self._used = self._used, 0

    def _get(self, wanted: int) -> None:
        """Get tokens: as many as in the last window, and twice as many if these are used up."""
        # From before the question: a late answer is not to make the window longer.
        now = time.monotonic()
        if now < self._held_until:
            return
        enough = max(wanted - self._tokens, self._used_before, self._used)
        try:
            grant = self._ask(enough)
        except UnreachableError:
            grant = Grant(0, WITHOUT_AN_ANSWER)
        if grant.tokens or not self._tokens:
            self._valid_until = now + grant.seconds
        self._tokens += grant.tokens
        if grant.tokens < enough:
            self._held_until = now + grant.seconds
