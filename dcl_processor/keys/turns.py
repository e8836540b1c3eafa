"""Keys take turns: a window has few rows of each key, and the longest key goes first."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from random import random, randrange
from typing import Any, NamedTuple

from dcl_processor.keys.window import Found

#: Rows of a run that are remembered as tried; with more of them it reads no further.
TRIED = 10_000

#: From how many rows of a key a worker begins at a random one.
MANY = 20

#: Answers one read, given the key after which it begins and the rows not to be tried again.
Read = Callable[[Any, Sequence[Any]], tuple[list[Found], Any]]


class _Key(NamedTuple):
    """A key among primary keys, to which it may be equal."""

    value: Any


@dataclass(slots=True)
class Turns:
    """Gives the candidates of a run, key by key.

    ``most``: how many rows of one key this run may have in flight; ``None``: any number.
    ``waiting``: the rows that were read, by their keys. ``line``: the keys that have some and may
    go on. Those with most rows come first, because a key that is handled one by one takes longest.
    ``mine``: the rows in flight, with their keys. ``tried``: rows that are not tried again in this
    run; in order, they hold their key while they are pending. ``paused``: keys that others had, and
    rows that they had alone, which do not go on in this cycle. ``failed``: keys in order whose head
    has failed; they are ``held`` for the rest of the run once a claim of another row is refused.
    """

    read: Read
    most: int | None
    in_order: bool
    waiting: dict[Any, deque[Any]] = field(default_factory=dict)
    line: list[tuple[int, float, Any]] = field(default_factory=list)
    in_line: set[Any] = field(default_factory=set)
    mine: dict[Any, Any] = field(default_factory=dict)
    at_work: dict[Any, int] = field(default_factory=dict)
    tried: dict[Any, None] = field(default_factory=dict)
    failed: set[Any] = field(default_factory=set)
    held: set[Any] = field(default_factory=set)
    paused: set[Any] = field(default_factory=set)
    after: Any = None
    is_over: bool = False
    found: int = 0

    def has_next(self) -> bool:
        """Return whether a row may be taken now; reads as long as there is none."""
        return bool(self.in_line) or self._refill()

    def take(self, room: int) -> dict[Any, Any]:
        """Return the primary keys of rows, with the keys that they had when they were read.

        None: no row is left that may be tried now, unless rows are in flight.
        """
        rows = dict[Any, Any]()
        while len(rows) < room and self.has_next():
            _, _, key = heappop(self.line)
            if key in self.in_line:
                self.in_line.discard(key)
                pk = self.waiting[key].popleft()
                self.at_work[key] = self.at_work.get(key, 0) + 1
                rows[pk] = self.mine[pk] = key
                self._join(key)
        return rows

    def end(
        self, pk: Any, *, done: bool = False, missed: bool = False, elsewhere: bool = False
    ) -> None:
        """Note what became of a row: its key goes on, is left to the next cycle, or is held.

        ``elsewhere``: another session has the row locked, and not its key.
        """
        key, alone = self._back(pk), elsewhere and not self.in_order
        if missed and key in self.failed:
            self.held.add(key)
        elif missed:
            self.pause(pk, None if alone else key)
        elif _Key(key) in self.paused:
            self.go_on(key)  # a place is free that a row of the key was missed for
        if not (done or missed):
            self.tried[pk] = None
        if key is not None and ((missed and not alone) or (not done and self.in_order)):
            # What was read of it is old: another worker has the key, or its head has failed.
            self.waiting.pop(key, None)
            self.in_line.discard(key)
            self.failed |= set() if missed else {key}
            self.is_over &= missed  # a head that was given up on holds its key no longer
        self._join(key)
        if not self.waiting.get(key):
            self.waiting.pop(key, None)
            self.is_over &= not done  # the key may have more rows than were read

    def put_back(self, pk: Any) -> None:
        """Let a row wait again that was not tried."""
        key = self._back(pk)
        self.waiting.setdefault(key, deque()).appendleft(pk)
        self._join(key)

    def pause(self, pk: Any, key: Any) -> None:
        """Leave a row that others had, and those of its key, to the next cycle."""
        self.paused.add(pk if key is None else _Key(key))

    def go_on(self, key: Any) -> None:
        """Let a key go on in this cycle."""
        self.paused.discard(_Key(key))
        self.is_over = False

    def resume(self) -> bool:
        """Begin another cycle for the rows that others had; return whether there are any."""
        again, self.is_over = bool(self.paused), False
        self.paused.clear()
        return again

    # --- keys

    def _back(self, pk: Any) -> Any:
        key = self.mine.pop(pk)
        self.at_work[key] -= 1
        if not self.at_work[key]:
            del self.at_work[key]
        return key

    def _join(self, key: Any) -> None:
        if key not in self.in_line and self.waiting.get(key) and not self._is_full(key):
            self.in_line.add(key)
            longest_first = 0 if key is None else -len(self.waiting[key])
            heappush(self.line, (longest_first, random(), key))  # noqa: S311  # no secret

    def _is_full(self, key: Any) -> bool:
        most = self.most if key is not None else None
        return most is not None and self.at_work.get(key, 0) >= most

    # --- windows

    def _refill(self) -> bool:
        """Read windows until there is something to take; false after a whole cycle without."""
        while not self.is_over:
            answer, self.after = self.read(self.after, [*self.tried])
            self.found += self._add(answer)
            if self.after is None:
                # An end is concluded from the table: a whole cycle that has found nothing.
                self.is_over, self.found = not self.found or len(self.tried) >= TRIED, 0
            if self.in_line:
                return True
        return False

    def _add(self, answer: Sequence[Found]) -> int:
        """Let the rows of a window wait; return of how many keys there are some."""
        new, known = dict[Any, deque[Any]](), {*self.mine}
        known |= {each for each in self.paused if not isinstance(each, _Key)}
        blocked = self.held | {key for key in self.at_work if self._is_full(key)}
        blocked |= {each.value for each in self.paused if isinstance(each, _Key)}
        for row in answer:
            if row.key in blocked or row.key in self.waiting or row.pk in known:
                continue
            known.add(row.pk)
            if row.is_due and row.pk not in self.tried:
                new.setdefault(row.key, deque()).append(row.pk)
            else:
                blocked.add(row.key)  # in order: those behind it wait
        self.waiting |= new
        for key, rows in new.items():
            if not self.in_order and len(rows) > MANY:
                rows.rotate(randrange(len(rows)))  # noqa: S311  # workers begin at different places
            self._join(key)
        return len(new)
