"""The candidates of a run, and the order in which they are met."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from dcl_processor.engine.context import Context
from dcl_processor.engine.rows import Batch
from dcl_processor.pending import scan
from dcl_processor.pending.question import Question
from dcl_processor.sql.steps import Claimed, Wanted

#: Locked rows that one run remembers and comes back to.
MOST_LOCKED = 10_000

#: Missed rows of a window that gave none, after which another one is read.
MOST_MISSES = 8

#: Rows that a worker claims without a miss before it takes itself for alone again.
ALONE_AFTER = 100

#: Additional rows that a claim may choose among.
SPARE = 48


class Source:
    """Gives rows to a run, and takes note of what became of them.

    ``may_choose``: claims may name more rows than they take. ``in_flight``: rows that were given
    and not ended.
    """

    #: Whether another worker has taken rows of this run not long ago.
    _among_others = False

    def __init__(self, host: Context, *, is_ordered: bool, may_choose: bool) -> None:
        self._host, self._may_choose, self._spreads = host, may_choose, not is_ordered
        #: Whether as many rows are in flight as may be, over all workers; the waits for a place.
        self._is_full, self._places = False, host.limits.waits()
        self.question: Question[Any] | None = None
        self._waiting: deque[Any] = deque()
        #: Rows that were rolled back together with others, to be handled alone.
        self._alone: deque[Any] = deque()
        #: Rows that may kill their process.
        self._last: list[Any] = []
        #: Rows that have a lease of a worker that is gone, and the one of them that is in flight.
        self._leftover: deque[Any] = deque()
        self._only: Any = None
        self._absent: list[Any] = []
        self._locked: list[Any] = []
        self._tried: set[Any] = set()
        self.in_flight: set[Any] = set()
        self._got = self._missed = self._since_miss = 0
        self._is_stale = self._is_returning = False
        self._phases = self._plan()

    # --- what the run takes

    def take(self, room: int) -> Batch | None:
        """Return the next rows to deliver, up to ``room``; ``None``: none now.

        None are left then, unless rows are in flight.
        """
        while room > 0 and self._only not in self.in_flight:
            if self._is_full and (self.in_flight or not self._has_place()):
                return None
            if self._has_candidates:
                # A limit that is just met is no reason to say that more is left.
                return None if self._host.must_stop() else self._batch(room)
            if self._host.stopped or not next(self._phases, False):
                return None
        return None

    @property
    def _has_candidates(self) -> bool:
        return bool(self._alone or self._leftover or (self._waiting and not self._is_stale))

    def _batch(self, room: int) -> Batch | None:
        waiting = self._alone or (deque() if self._is_stale else self._waiting)
        if not waiting:
            # Race: poison row. Such a row may have killed its worker, so nothing else is in flight
            # in this process when it is tried.
            if self.in_flight:
                return None
            waiting, self._only = self._leftover, self._leftover[0]
        is_alone = waiting is not self._waiting
        if self._alone and self._host.counters.refusals:
            # Race: poison row. Rows whose flip is refused would end each run before the others.
            waiting.rotate(-secrets.randbelow(len(waiting)))
        # A claim that was not answered is repeated row by row: one of them may be the cause.
        is_single = is_alone or self._is_returning or self._host.counters.refusals
        size = 1 if is_single else min(room, len(waiting))
        size = self._host.let_in(size, len(self.in_flight))
        if size <= 0:
            return None
        question = self.question
        assert question is not None
        chooses = self._may_choose and self._among_others and not (is_alone or question.claims)
        chooses = chooses and question.own_table
        more = SPARE if chooses else 0
        pks = [waiting.popleft() for _ in range(min(size + more, len(waiting)))]
        # Race: poison row. A row that fails stays pending, and is not read again in this run.
        self._tried.update(pks)
        self.in_flight.update(pks)
        return Batch(question, Wanted(pks, min(size, len(pks))), is_alone)

    # --- what became of them

    def note_claim(self, batch: Batch, claimed: Claimed) -> None:
        """Take note of rows that a claim did not get; those that it did not reach wait again."""
        got = len(claimed.rows)
        if batch.question.claims is not None:
            self._note_places(batch, got)
            if not got:
                return
        if got == len(batch.wanted.pks) and not self._among_others:
            self._got += got
            return
        visited = {*batch.wanted.visited(claimed.rows)}
        missed = [pk for pk in batch.wanted.pks if pk in visited and pk not in claimed.rows]
        stale = [pk for pk in missed if pk in claimed.locked]
        self._host.counters.counts["stale"] += len(stale)
        self._absent += [pk for pk in missed if pk not in claimed.locked]
        self.put_back([pk for pk in batch.wanted.pks if pk not in visited])
        self.in_flight.difference_update(missed)
        self._note_company(got, len(missed), batch)

    def _note_company(self, got: int, missed: int, batch: Batch) -> None:
        """Decide whether the rest of the window is stale: another worker has taken rows of it."""
        if missed:
            self._among_others, self._since_miss = True, 0
            self._missed += missed
            is_old = self._got > 0 or self._missed >= MOST_MISSES
            is_short = got < batch.wanted.limit
            self._is_stale = self._is_stale or (self._spreads and is_old and is_short)
        elif self._among_others:
            self._since_miss += got
            self._among_others = self._since_miss < ALONE_AFTER
        self._got += got

    def _note_places(self, batch: Batch, got: int) -> None:
        """Decide whether as many rows are in flight as may be: rows are pending, and not got."""
        if got:
            self._places = self._host.limits.waits()
            return
        pks = batch.wanted.pks
        there = scan.still_pending(batch.question, pks)
        self._host.counters.counts["stale"] += len(pks) - len(there)
        self._is_full = bool(there)
        self.put_back(there)
        self._waiting.rotate(-len(there))
        self.in_flight.difference_update(pks)

    def _has_place(self) -> bool:
        """Wait a little for a place; false: it takes too long, and the run is to end."""
        self._is_full = False
        if next(self._places, False):
            return True
        self._host.stopped = "busy"
        return False

    def put_back(self, pks: Sequence[Any]) -> None:
        """Take rows back that were not tried."""
        self.in_flight.difference_update(pks)
        self._tried.difference_update(pks)
        self._waiting.extendleft(reversed(pks))

    def missed(self, pks: Sequence[Any]) -> None:
        """Take rows back that another session keeps from being claimed: they are tried later."""
        self.in_flight.difference_update(pks)
        self._absent += pks

    def redo(self, pks: Sequence[Any]) -> None:
        """Take rows back that failed together: they are handled one by one."""
        self.in_flight.difference_update(pks)
        self._alone.extend(pks)

    def end(self, pks: Sequence[Any], left: Collection[Any] = ()) -> None:  # noqa: ARG002
        """Take note that rows are over; no row is tried twice, whether it is ``left`` or not."""
        self.in_flight.difference_update(pks)
        counters = self._host.counters
        if counters.is_to_move:
            # Or rows at the head that always fail would keep the others out.
            counters.is_to_move, counters.has_moved, self._is_stale = False, True, self._spreads
            self._waiting.rotate(-secrets.randbelow(len(self._waiting) or 1))

    def finish(self) -> None:
        """Count the rows that others still have locked."""
        if self._absent:
            self._look_at_absent()
        if self._is_returning:
            self._locked += self._waiting  # it had to stop before it came back to these
        self._host.counters.counts["skipped"] += len(self._locked)

    # --- the order

    def _plan(self) -> Iterator[bool]:
        """Set the next candidates each time; false: wait for the rows in flight."""
        yield from self._first()
        yield from self._later()
        self._alone.extend(self._last)
        yield from self._quiet()
        if self._host.stopped is None:
            self._host.notes.suspects.clear()  # those that are left are no longer pending

    def _quiet(self) -> Iterator[bool]:
        """Wait for the rows in flight, and for those that are to be redone."""
        while self._has_candidates or self.in_flight:
            yield self._has_candidates

    def _first(self) -> Iterator[bool]:
        """Meet every candidate once."""
        host = self._host
        host.counters.passes += 1
        by_key = scan.Scan(host.ask, self._tried)
        for question, waiting in by_key if self._spreads else by_key.in_order():
            self._begin_window(question, waiting)
            while self._has_candidates:
                yield True
            by_key.among_others = (
                self._among_others or host.counters.has_moved or by_key.among_others
            )
            if len(self._absent) >= scan.WINDOW:
                self._look_at_absent()
        self._waiting = deque()
        yield from self._quiet()
        self._look_at_absent()

    def _begin_window(self, question: Question[Any], waiting: deque[Any]) -> None:
        self._host.begin_window(question)
        self.question, self._waiting = question, waiting
        suspects = self._host.notes.suspects
        # Race: poison row. It would end each run before the rows behind it are tried.
        bad = [pk for pk in waiting if str(pk) in suspects] if suspects else []
        self._tried.update(bad)
        self._last += bad
        left = [pk for pk in waiting if pk in question.leftover]
        for pk in [*bad, *left]:
            waiting.remove(pk)
        self._leftover.extend(left)
        # Race: poison row. One that kills each run must not come before the others each time.
        self._leftover.rotate(secrets.randbelow(len(self._leftover) or 1))
        self._is_stale, self._got, self._missed = False, 0, 0
        # The scan forgets the tried rows after each window, and these may be behind it.
        for pk in self.in_flight.intersection(waiting):
            waiting.remove(pk)
            self._tried.add(pk)

    def _later(self) -> Iterator[bool]:
        """Come back to the rows that other sessions had locked, and only to those."""
        host = self._host
        waits = host.limits.waits()
        self._spreads, self._is_returning = False, True
        while self._locked and not host.must_stop() and next(waits, False):
            host.counters.passes += 1
            locked, self._locked = deque(self._locked), []
            self._begin_window(host.ask(), locked)
            yield from self._quiet()
            self._look_at_absent()

    def _look_at_absent(self) -> None:
        """Tell the rows that others have locked from those that are done: one read, without a lock.

        SKIP LOCKED returns neither of them, and only locked rows are worth coming back to.
        """
        absent, self._absent = self._absent, []
        if not absent or self.question is None:
            return
        locked = scan.still_pending(self.question, absent)
        counts = self._host.counters.counts
        counts["stale"] += len(absent) - len(locked)
        room = MOST_LOCKED - len(self._locked)
        self._locked += locked[:room]
        counts["skipped"] += len(locked[room:])
