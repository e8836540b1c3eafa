"""Keys take turns: a window has few rows of each key, and each key starts one of them first."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from random import random, randrange
from typing import Any

from dcl_processor.keys.window import Found

#: Rows of a run that are remembered as tried; with more of them it reads no further.
TRIED = 10_000

#: From how many rows of a key a worker begins at a random one.
MANY = 20

#: The place of a key that has had no turn in a window: before those with the most rows.
FIRST = -10_000

#: Answers one read, given the key after which it begins and the rows not to be tried again.
Read = Callable[[Any, Sequence[Any]], tuple[list[Found], Any]]


@dataclass(slots=True)
class Turns:
    """Gives the candidates of a run, key by key.

    ``most``: how many rows of one key this run may have in flight; ``None``: any number.
    ``waiting``: the rows that were read, by their keys. ``line``: the keys that have some and may
    go on. Each key comes once, and then those with most rows first, because a key that is handled
    one by one takes longest. ``at_work``: the rows in flight, by their keys. ``tried``: rows that
    are not tried again in this run; in order, they hold their key while they are pending.
    ``busy_keys``, ``busy_rows``: what others had, which waits for the next cycle.
    """

    read: Read
    most: int | None
    in_order: bool
    waiting: dict[Any, deque[Any]] = field(default_factory=dict)
    line: list[tuple[int, float, Any]] = field(default_factory=list)
    in_line: set[Any] = field(default_factory=set)
    at_work: dict[Any, set[Any]] = field(default_factory=dict)
    tried: dict[Any, None] = field(default_factory=dict)
    busy_keys: set[Any] = field(default_factory=set)
    busy_rows: set[Any] = field(default_factory=set)
    after: Any = None
    is_over: bool = False
    has_found: bool = False

    def has_next(self) -> bool:
        """Return whether a row may be taken now; reads as long as there is none."""
        while not (self.in_line or self.is_over):
            answer, self.after = self.read(self.after, [*self.tried])
            self.has_found |= self._add(answer)
            if self.after is None:
                # An end is concluded from the table: a whole cycle that has found nothing.
                self.is_over = not self.has_found or len(self.tried) >= TRIED
                self.has_found = False
        return bool(self.in_line)

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
                self.at_work.setdefault(key, set()).add(pk)
                rows[pk] = key
                self._join(key)
        return rows

    def end(self, pk: Any, key: Any, *, done: bool) -> None:
        """Note that a row is over; one that is not done is not tried again in this run."""
        self._back(pk, key)
        if not done:
            self.tried[pk] = None
            if self.in_order:
                self._forget(key)  # its head holds it, unless that was given up on
        # A place is free that another row of the key may have been missed for.
        self.busy_keys.discard(key)
        self._join(key)
        # The key may have more rows than were read.
        self.is_over &= key in self.waiting

    def miss(self, pk: Any, key: Any, *, is_alone: bool) -> None:
        """Leave a row to the next cycle, and its key unless others have the row alone."""
        self._back(pk, key)
        if key is None or (is_alone and not self.in_order):
            self.busy_rows.add(pk)
            self._join(key)
        else:
            self.busy_keys.add(key)
            self._forget(key)  # what was read of it is old: another worker has it

    def put_back(self, pk: Any, key: Any) -> None:
        """Let a row wait again that was not tried."""
        self._back(pk, key)
        self.waiting.setdefault(key, deque()).appendleft(pk)
        self._join(key)

    def go_on(self, key: Any) -> None:
        """Let a key go on in this cycle that others had."""
        self.busy_keys.discard(key)
        self.is_over = False

    @property
    def has_busy(self) -> bool:
        """Whether others had a row or a key in this cycle."""
        return bool(self.busy_keys or self.busy_rows)

    def resume(self) -> None:
        """Begin another cycle for what others had."""
        self.busy_keys.clear()
        self.busy_rows.clear()
        self.is_over = False

    # --- keys

    def _back(self, pk: Any, key: Any) -> None:
        self.at_work[key] = self.at_work.get(key, set()) - {pk}
        if not self.at_work[key]:
            del self.at_work[key]

    def _forget(self, key: Any) -> None:
        if key is not None:
            self.waiting.pop(key, None)
            self.in_line.discard(key)

    def _join(self, key: Any, *, is_new: bool = False) -> None:
        if not self.waiting.get(key):
            self.waiting.pop(key, None)
        elif key not in self.in_line and not self._is_full(key):
            self.in_line.add(key)
            place = FIRST if is_new else -len(self.waiting[key])
            heappush(self.line, (place, random(), key))  # noqa: S311  # no secret

    def _is_full(self, key: Any) -> bool:
        rows = self.at_work.get(key, ())
        return self.most is not None and key is not None and len(rows) >= self.most

    # --- windows

    def _add(self, answer: Sequence[Found]) -> bool:
        """Let the rows of a window wait; return whether there are any."""
        new = dict[Any, deque[Any]]()
        full = {key for key in self.at_work if self._is_full(key)}
        blocked = full | self.busy_keys | self.waiting.keys()
        known = self.busy_rows.union(*self.at_work.values())
        for row in answer:
            if row.key in blocked or row.pk in known:
                continue
            if row.is_due:
                new.setdefault(row.key, deque()).append(row.pk)
            else:
                blocked.add(row.key)  # in order: those behind it wait
        self.waiting |= new
        for key, rows in new.items():
            if not self.in_order and len(rows) > MANY:
                rows.rotate(randrange(len(rows)))  # noqa: S311  # workers begin at different places
            self._join(key, is_new=True)
        return bool(new)
