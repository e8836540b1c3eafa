"""The line of keys, and the lock-free reads of the rows of each.

A key whose turn it is gives its next rows, and goes to the end of the line. So a key with most of
the rows holds up no other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dcl_processor.candidates import groups as reads
from dcl_processor.candidates import scan
from dcl_processor.candidates.question import Question
from dcl_processor.definition.groups import Groups, Key

#: Keys that are visited again, and rows that are remembered.
MOST_KEPT = 10_000


@dataclass(eq=False, slots=True)
class Turn:
    """A key, and how far the run has come with it.

    ``alone``: its next rows, each of which is handled alone; ``waiting``: those that come after
    them. ``left``: rows that the run may still take of it; ``None``: not counted yet. ``tried``:
    rows that were handled, or are put last, and may still be pending; at ``forget_at`` rows, a
    query finds those that are no longer pending, and they are removed; ``missed``: those that
    another session has locked.
    ``in_flight``: batches; ``is_in_line``: or among the next ones. ``is_old``: ``waiting`` is to be
    checked. ``size``: rows that are read at once in order. ``suspects``: rows that may kill the
    process; ``is_last``: all others were handled.
    """

    key: Key
    alone: deque[Any] = field(default_factory=deque)
    waiting: deque[Any] = field(default_factory=deque)
    left: int | None = None
    tried: set[Any] = field(default_factory=set)
    forget_at: int = 2 * reads.ROWS
    missed: set[Any] = field(default_factory=set)
    in_flight: int = 0
    is_in_line: bool = False
    is_old: bool = False
    size: int = reads.ROWS
    suspects: set[Any] = field(default_factory=set)
    is_last: bool = False

    @property
    def next_rows(self) -> deque[Any]:
        """The rows that were read, as far as they may be in one batch."""
        return self.alone or self.waiting


@dataclass(eq=False, slots=True)
class Share:
    """The candidates of one key in a batch; ``has_left``: the key is in line before their end."""

    turn: Turn
    pks: Sequence[Any]
    has_left: bool = False


class Turns:
    """Keeps track of the keys of a run: in line, busy, and held.

    ``line``: the keys to visit, the next one first; ``ready``: those whose next rows were read.
    ``busy``: those that are visited again later, by their values; ``held``: those that are left to
    the next run.
    """

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self.line: deque[Turn] = deque()
        self.ready: deque[Turn] = deque()
        self.busy: dict[Any, Turn] = {}
        self.held: dict[Any, Turn] = {}

    def join(self, turn: Turn) -> None:
        """Put a key at the end of the line, unless it is in line."""
        if not turn.is_in_line:
            turn.is_in_line = True
            self.line.append(turn)

    def join_busy(self) -> None:
        """Put the busy keys in line again; their rows are read again."""
        turns, self.busy = list(self.busy.values()), {}
        for turn in turns:
            turn.missed.clear()
            self._read_again(turn)
            self.join(turn)

    def busy_later(self, turn: Turn) -> None:
        """Visit a key again when the others had their turns."""
        room = len(self.busy) < MOST_KEPT
        self._leave_line(turn, self.busy if room else self.held)

    def hold(self, turn: Turn) -> None:
        """Leave a key to the next run."""
        self._leave_line(turn, self.held)

    def _leave_line(self, turn: Turn, where: dict[Any, Turn]) -> None:
        if turn.is_in_line:
            turn.is_in_line = False
            (self.line if turn in self.line else self.ready).remove(turn)
        if len(where) < MOST_KEPT:
            where[turn.key.value] = turn

    # --- the next rows of a key

    def has_rows(self, question: Question[Any], turn: Turn) -> bool:
        """Return whether the key has rows to try; if it has none, it is over, busy or held."""
        if turn.is_old:
            turn.is_old = False
            self._check_waiting(question, turn)
        return bool(turn.next_rows) or self._read_rows(question, turn)

    def _check_waiting(self, question: Question[Any], turn: Turn) -> None:
        """Drop the rows in line that other workers have finished; in order, read all of them again.

        After a row that failed, or was handled elsewhere, only the head shows how the key goes on.
        So that many such rows do not read the key as many times, few rows are read first.
        """
        if self._groups.in_order:
            self._read_again(turn)
        else:
            # Those behind them are checked when they are claimed.
            some = [turn.waiting.popleft() for _ in range(min(reads.ROWS, len(turn.waiting)))]
            turn.waiting.extendleft(reversed(scan.still_pending(question, some)))

    def _read_again(self, turn: Turn) -> None:
        turn.waiting.clear()
        turn.size = 1

    def _read_rows(self, question: Question[Any], turn: Turn) -> bool:
        """Read the next rows of a key; return whether there are any."""
        if turn.in_flight or (turn.left is not None and turn.left <= 0):
            return False
        # Tried rows that are no longer pending are forgotten, such as those that were given up on.
        if len(turn.tried) >= turn.forget_at:
            turn.tried = reads.unfinished(question, turn.tried)
            # Many may stay pending, and are not to be looked up again for each read.
            turn.forget_at = 2 * max(reads.ROWS, len(turn.tried))
        found, is_full = self._candidates(question, turn)
        if turn.left is None:
            # Race: endless run. Rows of a key that keep arriving must not keep the run going.
            turn.left = reads.count(question, turn.key) if is_full else len(found)
        free = self._in_order(turn, found) if self._groups.in_order else found
        seen = turn.tried | turn.missed
        turn.waiting = deque(each.pk for each in free if each.pk not in seen)
        if not turn.waiting and any(each.pk in turn.missed for each in found):
            self.busy_later(turn)
        return bool(turn.waiting)

    def _candidates(
        self, question: Question[Any], turn: Turn
    ) -> tuple[list[reads.Candidate], bool]:
        """Read rows of a key until there is one that was not tried."""
        if self._groups.in_order:
            most, turn.size = turn.size, min(2 * turn.size, reads.ROWS)
            return reads.candidates(question, turn.key, most=most)
        # Rows that failed come first again. They are skipped here and not in the query, because
        # there may be many. As many rows are read behind them as before, so that each row of the
        # key is read about twice, and not once for each read.
        seen = turn.tried | turn.missed
        most = reads.ROWS + 2 * len(seen)
        while True:
            found, is_full = reads.candidates(question, turn.key, most=most)
            # Each row may come many times, once for each match of a filter over a to-many relation.
            if not is_full or any(each.pk not in seen for each in found):
                return found, is_full
            most *= 2

    def _in_order(self, turn: Turn, found: list[reads.Candidate]) -> list[reads.Candidate]:
        """Return the rows up to the first one that blocks those behind it."""
        seen = turn.tried | turn.missed
        for place, candidate in enumerate(found):
            blocks = not candidate.is_due or candidate.pk in seen
            if blocks:
                if place == 0 and candidate.pk not in turn.missed:
                    self.hold(turn)
                return found[:place]
        return found
