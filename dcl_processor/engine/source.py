"""The candidates of a run, which its lanes share, and the order in which they are met."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from enum import Enum
from random import shuffle
from threading import Condition
from typing import TYPE_CHECKING, Any

from dcl_processor import steady as time
from dcl_processor.candidates import scan
from dcl_processor.candidates.question import Question, is_ordered

from .settlement import Batch, Missed, Wanted, spare

if TYPE_CHECKING:
    from .run import Run

#: Locked rows that one run remembers and comes back to.
MOST_LOCKED = 10_000

#: Missed rows of a window that gave none, after which another one is read.
MOST_MISSES = 8

#: Rows that a worker claims without a miss before it takes itself for alone again.
ALONE_AFTER = 100

#: Seconds between two looks whether the run is to stop, of a lane that waits for another one.
LOOK = 0.05


class Step(Enum):
    """What a lane that has no candidates does next."""

    GO_ON = "take the candidates that are set"
    WAIT = "wait for the rows in flight"
    END = "end: there are no more"


class Source:
    """Gives rows to the lanes of a run, and takes note of what became of them.

    Only ``refill()`` reads, or waits. ``question``: that of the window at hand.
    """

    #: Whether another worker has taken rows of this run not long ago.
    _among_others = False

    def __init__(self, run: Run, question: Question[Any]) -> None:
        self._run = run
        self.question = question
        self._lock = Condition()
        self._waiting: deque[Any] = deque()
        #: Rows that were rolled back together with others, to be handled alone.
        self._alone: deque[Any] = deque()
        self._absent: list[Any] = []
        self._locked: list[Any] = []
        self._tried: set[Any] = set()
        self._in_flight: set[Any] = set()
        #: Whether rows may be taken out of the window's order, at a random place.
        self._spreads = not is_ordered(question.queryset)
        self._got = self._missed = self._since_miss = 0
        self._is_stale = self._is_held = False
        #: Whether the candidates are rows that an earlier claim did not get.
        self.is_returning = False
        self._notes = run.notes
        self._phases = self._plan()

    @property
    def is_busy(self) -> bool:
        """Whether rows are in flight."""
        return bool(self._in_flight)

    # --- what the lanes take

    def take(self, room: int) -> Batch | None:
        """Return the next rows to deliver, up to ``room``; ``None``: that takes a read, or a wait.

        A row that is to be redone is alone.
        """
        with self._lock:
            run = self._run
            if self._waiting and (self._notes.known or time.monotonic() >= self._notes.look_at):
                # Rows that were in flight when their process died are put aside.
                for pk in self._notes.among(self._waiting):
                    self._waiting.remove(pk)
                    self._tried.add(pk)
            waiting = self._alone or self._waiting
            if not waiting or (self._is_stale and waiting is self._waiting):
                return None
            if run.must_stop():
                return None
            size = min(self._room(min(room, 1) if self._alone else room), len(waiting))
            if size <= 0:
                return None
            overseer = run.overseer
            if overseer is not None and (size := overseer.take(size)) <= 0:
                self._is_held = True
                return None
            # Other handlers of this run could not get the candidates that it leaves until its end.
            is_alone = run.concurrency == 1 and run.event_loop is None
            # A choice takes one message more if the question spans tables: only after a miss then.
            has_missed = self._since_miss == 0 or self.question.own_table
            may_choose = self._among_others and is_alone and has_missed
            more = spare(self.question) if may_choose and waiting is self._waiting else 0
            pks = [waiting.popleft() for _ in range(min(size + more, len(waiting)))]
            # Race: poison row. A row that fails stays pending, and is not read again in this run.
            self._tried.update(pks)
            self._in_flight.update(pks)
            window = overseer.window if overseer is not None else 0
            return Batch(self.question, Wanted(pks, size), window)

    @property
    def has_candidates(self) -> bool:
        """Whether there are rows to take without a read."""
        return bool(self._alone or (self._waiting and not self._is_stale))

    def _room(self, size: int) -> int:
        """Return how many of so many rows may be in flight besides those that are."""
        run = self._run
        in_flight = len(self._in_flight)
        if run.limits.rows is not None:
            size = run.limits.clip(size, run.counters.handled + in_flight)
        is_without_slot = run.slot is not None and not run.slot.is_held()
        if (in_flight and run.rehearsal is None) or is_without_slot:
            return 0  # the flips are verified with the first rows
        counters = run.counters
        if (counters.may_be_refused or counters.streak.wrong) and counters.is_to_be_careful:
            return min(size, 1 - in_flight)
        return size

    def refill(self, *, waits: bool = True) -> bool:
        """Read the next window, or wait for the other lanes; return whether to go on.

        ``waits``: otherwise this returns at once, because the lane has rows in flight itself.
        """
        with self._lock:
            while not self._run.is_over:
                is_waiting = self.has_candidates or self._is_held
                if is_waiting and self._run.must_stop():
                    return False
                step = self._next_step(is_waiting=is_waiting)
                if step is not Step.WAIT:
                    self._is_held = False
                    return step is Step.GO_ON
                if not waits:
                    return True
                self._lock.wait(LOOK)
        return False

    def _next_step(self, *, is_waiting: bool) -> Step:
        """Return what to do next; ``is_waiting``: candidates are set, or held back."""
        if not is_waiting:
            return next(self._phases, Step.END)
        no_room = self._in_flight and (self._is_held or self._room(1) <= 0)
        self._is_held = False
        # Only the end of the rows in flight shows whether there is room.
        return Step.WAIT if no_room else Step.GO_ON

    # --- what became of them

    def note_claim(self, batch: Batch) -> None:
        """Take note of rows that a claim did not get; those that it did not reach wait again."""
        claimed = batch.claimed
        assert claimed is not None
        got = len(claimed.rows)
        if got == len(batch.wanted.pks) and not self._among_others:
            self._got += got
            return
        with self._lock:
            known, missed = {held.pk for held in claimed.rows}, claimed.missed
            absent = [pk for pk, why in missed.items() if why is Missed.ABSENT]
            self._absent += absent
            self._run.counters.counts["stale"] += len(missed) - len(absent)
            self._put_back([pk for pk in batch.wanted.pks if pk not in known and pk not in missed])
            self._in_flight.difference_update(missed)
            self._note_company(got, len(missed))
            self._lock.notify_all()

    def _note_company(self, got: int, missed: int) -> None:
        """Decide whether the rest of the window is stale: another worker has taken rows of it."""
        if missed:
            self._among_others, self._since_miss = True, 0
            self._missed += missed
            # A worker that holds rows in bulk would hold those of another window, too.
            is_old = self._got > 0 or self._missed >= MOST_MISSES
            is_short = got < self._run.size
            self._is_stale = self._is_stale or (self._spreads and is_old and is_short)
        elif self._among_others:
            self._since_miss += got
            self._among_others = self._since_miss < ALONE_AFTER
        self._got += got

    def give_back(self, batch: Batch, *, missed: bool = False) -> None:
        """Take rows back that were not claimed.

        ``missed``: because of other sessions, so that a later pass asks again.
        """
        with self._lock:
            pks = self._open_rows(batch)
            batch.is_counted = True
            if missed:
                self._absent += pks
                self._in_flight.difference_update(pks)
            else:
                self._put_back(pks)
            self._give_tokens_back(batch, 0)
            self._lock.notify_all()

    def end(self, batch: Batch, redone: Sequence[Any] = ()) -> None:
        """Count the rows of a batch that is over; ``redone``: are to be handled again, alone."""
        with self._lock:
            if batch.is_counted:
                return
            self._count(batch)
            batch.is_counted = True
            streak = self._run.counters.streak
            if streak.is_to_move:
                # Or rows at the head that always fail would keep the others out.
                shuffle(self._alone)
                streak.is_to_move, streak.has_moved = False, True
                # In the user's order the rest of the window comes first.
                self._waiting.rotate(-scan.place_among(self._waiting))
                self._is_stale = self._spreads
            claimed = batch.claimed
            # Those that it did not get may be in flight again, in another lane.
            pks = batch.wanted.pks if claimed is None else [held.pk for held in claimed.rows]
            self._in_flight.difference_update(pks)
            again = [held.pk for held, outcome in batch.ended if outcome is None]
            self._alone.extend(redone)
            # A claim that failed may have named more rows than it was to take.
            behind = batch.wanted.pks[batch.wanted.limit :] if claimed is None else []
            if again or behind:
                self._put_back([*again, *behind])
            if self._run.overseer is not None:
                self._give_tokens_back(batch, len(batch.ended) - len(again))
            self._lock.notify_all()

    def _count(self, batch: Batch) -> None:
        """Count each row once, also if an interrupt comes in between and this is called again."""
        counters = self._run.counters
        for held, outcome in batch.ended[batch.counted :]:
            before = counters.handled
            try:
                if outcome is not None:
                    counters.count(held.pk, outcome)
            except BaseException:
                # Only what comes behind the count was interrupted.
                batch.counted += counters.handled > before
                raise
            batch.counted += 1

    def _open_rows(self, batch: Batch) -> Sequence[Any]:
        """Return the rows of a batch that are in flight."""
        if batch.claimed is None:
            return batch.wanted.pks
        return [held.pk for held in batch.claimed.rows]

    def _put_back(self, pks: Sequence[Any]) -> None:
        self._in_flight.difference_update(pks)
        self._tried.difference_update(pks)
        self._waiting.extendleft(reversed(pks))

    def _give_tokens_back(self, batch: Batch, started: int) -> None:
        if self._run.overseer is not None:
            self._run.overseer.give_back(batch.wanted.limit - started, batch.window)

    def settled(self, batch: Batch) -> None:
        """Take note that rows of a batch are settled, while handlers of others are at work."""

    # --- the order

    def _ask(self) -> Question[Any]:
        return self._run.ask()

    def _plan(self) -> Iterator[Step]:
        """Set the next candidates each time."""
        yield from self._first()
        yield from self._later()
        yield from self._last()

    def _quiet(self) -> Iterator[Step]:
        """Wait for the rows in flight, and for those that are to be redone."""
        while self._alone or self._waiting or self._in_flight:
            has_some = self._alone or (self._waiting and not self._is_stale)
            yield Step.GO_ON if has_some else Step.WAIT
            self._is_stale = False

    def _first(self) -> Iterator[Step]:
        """Meet every candidate once."""
        run = self._run
        run.counters.passes += 1
        by_key = scan.KeyScan(self._ask, self._tried)
        windows = by_key if self._spreads else scan.ordered_scan(self._ask, self._tried)
        for question, waiting in windows:
            run.refuse_backlog(question, waiting)
            self._begin_window(question, waiting)
            while self.has_candidates:
                yield Step.GO_ON
            if self._among_others or run.counters.streak.has_moved:
                by_key.scatter()
            if len(self._absent) >= scan.WINDOW:
                self._look_at_absent()
        self._waiting = deque()
        yield from self._quiet()
        self._look_at_absent()

    def _begin_window(self, question: Question[Any], waiting: deque[Any]) -> None:
        self.question, self._waiting = question, waiting
        self._is_stale, self._got, self._missed = False, 0, 0
        # The scan forgets the tried rows after each window, and these may be behind it.
        for pk in self._in_flight.intersection(waiting):
            waiting.remove(pk)
            self._tried.add(pk)

    def _later(self) -> Iterator[Step]:
        """Come back to the rows that other sessions had locked, and only to those."""
        run = self._run
        waits = run.limits.waits()
        self._spreads, self.is_returning = False, True
        while self._locked and not run.must_stop() and next(waits, False):
            run.counters.passes += 1
            locked, self._locked = deque(self._locked), []
            self._begin_window(self._ask(), locked)
            yield from self._quiet()
            self._look_at_absent()

    def _last(self) -> Iterator[Step]:
        """Handle the rows that were in flight when their process died: one by one, and last."""
        for pk in self._suspects_in_turn():
            self.question, self._waiting, self.is_returning = self._ask(), deque(), False
            self._alone.append(pk)
            yield from self._quiet()
            self._look_at_absent()

    def close(self) -> None:
        """Forget the plan, which refers to this object."""
        self._phases = iter(())

    def finish(self) -> None:
        """Count the rows that others still have locked, and forget the notes of finished rows."""
        run = self._run
        if self._absent:
            self._look_at_absent()
        if self._locked:
            run.must_stop()
        if self.is_returning:
            self._locked += self._waiting  # it had to stop before it came back to these
        run.counters.counts["skipped"] += len(self._locked)
        # A row that the run did not meet is not pending, unless the run ended before it.
        if run.stopped is None and run.filter is None:
            self._notes.settle([*self._locked, *self._left_suspects(), *self._leased()])

    def _suspects_in_turn(self) -> list[Any]:
        return self._notes.in_turn()

    def _left_suspects(self) -> list[Any]:
        """Return the rows that may kill their process, and that this run has not tried."""
        return self._notes.left()

    def _leased(self) -> list[Any]:
        """Return the leased rows if processes have died: among them may be rows that these held.

        Also those whose lease has lapsed: perhaps only after the run has looked for rows, so that
        it has not come to them.
        """
        run = self._run
        if run.processor.lease is None or not run.notes.deaths:
            return []
        # Race: poison row. Without its note, such a row would come first in the next run.
        held = run.ask(due=False).unfiltered.filter(run.processor.lease.held()).order_by()
        return list(held.values_list("pk", flat=True)[:MOST_LOCKED])

    def _look_at_absent(self) -> None:
        """Tell the rows that others have locked from those that are done: one read, without a lock.

        SKIP LOCKED returns neither of them, and only locked rows are worth coming back to.
        """
        absent, self._absent = self._absent, []
        locked = scan.still_pending(self.question, absent)
        self._run.counters.counts["stale"] += len(absent) - len(locked)
        room = MOST_LOCKED - len(self._locked)
        self._locked += locked[:room]
        self._run.counters.counts["skipped"] += len(locked[room:])
