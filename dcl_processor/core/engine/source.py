"""The candidates of a run, and the order in which they are met."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any, Protocol

from dcl_processor.core.engine.limits import Limits
from dcl_processor.core.engine.poison import Notes
from dcl_processor.core.engine.rows import Batch
from dcl_processor.core.pending import scan
from dcl_processor.core.pending.question import Question
from dcl_processor.core.report.counters import Counters
from dcl_processor.core.report.report import Stopped
from dcl_processor.core.sql.steps import Claimed, Wanted

#: Locked rows that one run remembers and comes back to.
MOST_LOCKED = 10_000

#: Missed rows of a window that gave none, after which another one is read.
MOST_MISSES = 8

#: Rows that a worker claims without a miss before it takes itself for alone again.
ALONE_AFTER = 100

#: Additional rows that a claim may choose among.
SPARE = 48


class Host(Protocol):
    """What the source asks of its run."""

    limits: Limits
    counters: Counters
    stopped: Stopped | None
    notes: Notes | None

    def ask(self, *, keyed: bool = True) -> Question[Any]:
        """Return the question for the next window; ``keyed``: only rows whose key is free."""
        ...

    def must_stop(self) -> bool:
        """Return whether no further row may start."""
        ...

    def begin_window(self, question: Question[Any], seen: int) -> None:
        """Take note of a window; may raise."""
        ...


class _Step(Enum):
    GO_ON = "candidates may be set"
    WAIT = "wait for the rows in flight"


class Source:
    """Gives rows to a run, and takes note of what became of them.

    ``may_choose``: claims may name more rows than they take. ``in_flight``: rows that were given
    and not ended.
    """

    #: Whether another worker has taken rows of this run not long ago.
    _among_others = False

    def __init__(self, host: Host, *, is_ordered: bool, may_choose: bool, has_keys: bool) -> None:
        self._host, self._may_choose = host, may_choose
        self._spreads = not (is_ordered or has_keys)
        #: Of rows in groups, the keys of the window's rows, and the keys in flight.
        self._has_keys, self._keys = has_keys, dict[Any, Any]()
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
            if self._has_candidates:
                # A limit that is just met is no reason to say that more is left.
                return None if self._host.must_stop() else self._batch(room)
            if self._host.stopped or next(self._phases, _Step.WAIT) is _Step.WAIT:
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
        size = 1 if is_alone or self._host.counters.refusals else min(room, len(waiting))
        most = self._host.limits.rows
        if most is not None:
            size = min(size, most - self._host.counters.handled - len(self.in_flight))
        if size <= 0:
            return None
        question = self.question
        assert question is not None
        chooses = self._may_choose and self._among_others and question.own_table and not is_alone
        more = SPARE if chooses else 0
        pks = self._next(waiting, size + more)
        if not pks:
            return None
        # Race: poison row. A row that fails stays pending, and is not read again in this run.
        self._tried.update(pks)
        self.in_flight.update(pks)
        return Batch(question, Wanted(pks, min(size, len(pks))), is_alone)

    def _next(self, waiting: deque[Any], number: int) -> list[Any]:
        """Take the next rows; of rows in groups, those of one key that is not in flight."""
        if not self._has_keys:
            return [waiting.popleft() for _ in range(min(number, len(waiting)))]
        busy = {self._keys.get(pk) for pk in self.in_flight} - {None}
        key: Any = None
        pks: list[Any] = []
        for pk in [*waiting]:
            its = self._keys.get(pk)
            if its not in busy and (not pks or (its is not None and its == key)):
                key = its
                pks.append(pk)
                waiting.remove(pk)
            if len(pks) == number or (pks and key is None):
                break
        return pks

    # --- what became of them

    def note_claim(self, batch: Batch, claimed: Claimed) -> None:
        """Take note of rows that a claim did not get; those that it did not reach wait again."""
        got = len(claimed.rows)
        if got == len(batch.wanted.pks) and not self._among_others:
            self._got += got
            return
        missed = [pk for pk in claimed.visited if pk not in claimed.rows]
        stale = [pk for pk in missed if pk in claimed.locked]
        self._host.counters.counts["stale"] += len(stale)
        self._absent += [pk for pk in missed if pk not in claimed.locked]
        visited = {*claimed.visited}
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

    def end(self, pks: Sequence[Any]) -> None:
        """Take note that rows are over."""
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
        counts = self._host.counters.counts
        counts["skipped"] += len(self._locked)
        if self._has_keys and self._host.stopped is None and self.question is not None:
            # Rows that may be tried and were not, because of another row of their key.
            counts["held"] += scan.count(self._host.ask(keyed=False), MOST_LOCKED, self._tried)

    # --- the order

    def _plan(self) -> Iterator[_Step]:
        """Set the next candidates each time."""
        yield from self._all_keys() if self._has_keys else self._all_rows()
        self._alone.extend(self._last)
        yield from self._quiet()
        if self._host.notes is not None and self._host.stopped is None:
            self._host.notes.suspects.clear()  # those that are left are no longer pending

    def _all_rows(self) -> Iterator[_Step]:
        yield from self._first()
        yield from self._later()

    def _all_keys(self) -> Iterator[_Step]:
        yield from self._in_turn()
        waits = self._host.limits.waits()
        while self._locked and not self._host.must_stop() and next(waits, False):
            self._tried.difference_update(self._locked)
            self._locked = []
            yield from self._in_turn()

    def _in_turn(self) -> Iterator[_Step]:
        """Meet the rows of keys that are free, and read again, because others are free then."""
        host, left = self._host, None
        host.counters.passes += 1
        while left != 0:
            question = host.ask()
            rows = deque(scan.whose_turn_it_is(question, self._tried)[:left])
            if not rows and not self.in_flight:
                break
            if rows:
                # Race: endless run. Rows that arrive during the run are left to the next one.
                left = scan.count(host.ask(keyed=False), MOST_LOCKED) if left is None else left
                shown = len(rows)
                self._begin_window(question, rows)
                while self._has_candidates:
                    yield _Step.GO_ON
                left -= shown - len(rows)
            if self.in_flight:
                yield _Step.WAIT
        yield from self._quiet()
        self._look_at_absent()

    def _quiet(self) -> Iterator[_Step]:
        """Wait for the rows in flight, and for those that are to be redone."""
        while self._has_candidates or self.in_flight:
            yield _Step.GO_ON if self._has_candidates else _Step.WAIT

    def _first(self) -> Iterator[_Step]:
        """Meet every candidate once."""
        host = self._host
        host.counters.passes += 1
        by_key = scan.KeyScan(host.ask, self._tried)
        windows = by_key if self._spreads else scan.ordered_scan(host.ask, self._tried)
        for question, waiting in windows:
            self._begin_window(question, waiting)
            while self._has_candidates:
                yield _Step.GO_ON
            by_key.among_others = (
                self._among_others or host.counters.has_moved or by_key.among_others
            )
            if len(self._absent) >= scan.WINDOW:
                self._look_at_absent()
        self._waiting = deque()
        yield from self._quiet()
        self._look_at_absent()

    def _begin_window(self, question: Question[Any], waiting: deque[Any]) -> None:
        self._host.begin_window(question, len(waiting))
        self.question, self._waiting = question, waiting
        suspects = self._host.notes.suspects if self._host.notes is not None else ()
        if suspects:
            # Race: poison row. It would end each run before the rows behind it are tried.
            bad = [pk for pk in waiting if str(pk) in suspects]
            for pk in bad:
                waiting.remove(pk)
            self._tried.update(bad)
            self._last += bad
        left = [pk for pk in waiting if pk in question.leftover]
        for pk in left:
            waiting.remove(pk)
        self._leftover.extend(left)
        self._is_stale, self._got, self._missed = False, 0, 0
        if self._has_keys and question.key is not None:
            known = question.table.filter(pk__in=[*waiting, *self.in_flight])
            self._keys = dict(known.values_list("pk", question.key))
        # The scan forgets the tried rows after each window, and these may be behind it.
        for pk in self.in_flight.intersection(waiting):
            waiting.remove(pk)
            self._tried.add(pk)

    def _later(self) -> Iterator[_Step]:
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
        question = self._host.ask(keyed=False) if self._has_keys else self.question
        locked = scan.still_pending(question, absent)
        counts = self._host.counters.counts
        counts["stale"] += len(absent) - len(locked)
        room = MOST_LOCKED - len(self._locked)
        self._locked += locked[:room]
        counts["skipped"] += len(locked[room:])
