"""The passes of a run: it visits each candidate once, and again while other workers hold it."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from dcl_processor.candidates import scan
from dcl_processor.candidates.question import Question
from dcl_processor.delivery.batch import Batch
from dcl_processor.execution.calls import each_beside
from dcl_processor.locking.claiming import Miss
from dcl_processor.locking.wanted import Wanted, spare

from .rescan import RescanPolicy
from .suspects import Suspects

if TYPE_CHECKING:
    from .run import Run

#: What a run waits for when it reads the next rows.
READ = "the read of pending"

#: Locked rows that one run remembers and comes back to.
MOST_LOCKED = 10_000


class Passes:
    """Keeps track of a run's rows: tried, in flight, missed, and held by other workers."""

    def __init__(self, run: Run[Any]) -> None:
        self._run = run
        self._ask = run.ask
        self._locked: list[Any] = []
        self._absent: list[Any] = []
        self._tried: set[Any] = set()
        self._in_flight: set[Any] = set()
        # Rows that were rolled back together with others, until they are handled alone.
        self._alone: set[Any] = set()
        # Rows tried while nothing had succeeded, and rows tried out of order.
        self._failing: set[Any] = set()
        self._probed: set[Any] = set()
        self._suspects = Suspects(run.notes)
        #: Suspects that were not tried, because their key was not free.
        self._left_suspects: list[Any] = []

    def first(self) -> None:
        """Visit every candidate once."""
        self._run.counters.passes += 1
        policy = RescanPolicy(never=self._run.processor.strict_order)
        by_key = scan.KeyScan(self._ask, self._tried)
        in_order = scan.ordered_scan(self._ask, self._tried)
        windows = in_order if self._run.processor.strict_order else by_key
        for question, waiting in each_beside(self._run.processor.name, READ, windows):
            self._run.refuse_backlog(question, waiting)
            policy.begin_window(alone=not by_key.among_others)
            if self._visit_window(question, waiting, policy):
                by_key.met_another()
            if len(self._absent) >= scan.WINDOW:
                self._look_at_absent(question)
            if self._run.stopped:
                break
        self._visit_left()
        if self._absent:
            self._look_at_absent(self._ask())

    def _visit_left(self) -> None:
        """Wait for the batches in flight, and visit the rows that are to be redone."""
        left: deque[Any] = deque()
        self.take(self._run.dispatcher.ended(everything=True), left)
        # A run that is to stop leaves rows of a batch behind, even of the last batch.
        while left and not self._run.must_stop():
            self._visit(self._ask(), left, more=0)
            self.take(self._run.dispatcher.ended(everything=True), left)

    def _visit_window(
        self, question: Question[Any], waiting: deque[Any], policy: RescanPolicy
    ) -> bool:
        """Visit a window's candidates; return whether to read another window before its end."""
        self._leave_out_visited(waiting)
        while self._without_suspects(waiting) and not self._run.must_stop():
            if self._run.counters.streak.to_probe and self._probes(question, waiting):
                continue
            chooses = self._run.dispatcher.may_choose and policy.should_choose(
                own_table=question.own_table
            )
            more = spare(question) if chooses else 0
            got, missed, replaced = self._visit(question, waiting, more=more)
            if policy.should_rescan(got, missed, replaced=replaced):
                return True
        return False

    def _probes(self, question: Question[Any], waiting: deque[Any]) -> bool:
        """Try rows at random places if the next rows are likely to fail like those before."""
        counters = self._run.counters
        if counters.probing:
            return False
        self.take(self._run.dispatcher.ended(everything=True), waiting)
        if not counters.streak.to_probe:
            return False  # one of those that were in flight has succeeded
        counters.probing = True
        found = scan.anywhere(question, counters.streak.to_probe)
        probed = deque(pk for pk in found if pk not in self._tried | self._failing)
        if not self._without_suspects(probed):
            return False  # there are no others: go on with the next rows
        while probed and counters.streak.to_probe and not self._run.must_stop():
            self._visit(question, probed, more=0)
            self.take(self._run.dispatcher.ended(everything=True), probed)
        self._probed.update(pk for pk in found if pk not in probed)
        self._leave_out_visited(waiting)
        counters.probing = False
        return True

    def _leave_out_visited(self, waiting: deque[Any]) -> None:
        left_out = (self._in_flight | self._probed).intersection(waiting)
        # The scan forgets the tried rows after each window, and these may be behind it.
        self._tried.update(left_out)
        for pk in left_out:
            waiting.remove(pk)
        elsewhere = self._run.context.elsewhere
        # Claiming these would only show again that they failed in another worker.
        failed = [] if elsewhere is None else elsewhere.among(waiting)
        self._tried.update(failed)
        for pk in failed:
            waiting.remove(pk)

    def later(self) -> None:
        """Come back to the rows that other workers had locked, and only to those."""
        waits = self._run.limits.waits()
        while self._locked and not self._run.must_stop() and next(waits, False):
            self._run.counters.passes += 1
            waiting, self._locked = deque(self._locked), []
            while waiting:
                question = self._ask()
                more = spare(question) if self._run.dispatcher.may_choose else 0
                while (
                    self._without_suspects(waiting)
                    and len(self._absent) < scan.WINDOW
                    and not self._run.must_stop()
                ):
                    self._visit(question, waiting, more=more)
                self.take(self._run.dispatcher.ended(everything=True), waiting)
                self._look_at_absent(question)
                if self._run.must_stop():
                    self._locked += waiting
                    break

    def last(self) -> None:
        """Handle the rows that were in flight when their process died: one by one, and last."""
        for pk in self._suspects_in_turn():
            if self._run.must_stop():
                break
            question, alone = self._ask(), deque([pk])
            while alone and not self._run.must_stop():
                self._visit(question, alone, more=0)
            self.take(self._run.dispatcher.ended(everything=True))
            self._look_at_absent(question)
        if self._locked:
            self._run.must_stop()
        self._run.counters.counts["skipped"] += len(self._locked)
        # A row that the run did not meet is not pending, unless the run ended before it.
        if self._run.stopped is None and not self._run.is_filtered:
            left = [*self._locked, *self._left_suspects, *self._left_to_others()]
            self._suspects.settle([*left, *self._leased()])

    def _left_to_others(self) -> list[Any]:
        """Return the suspects that have failed, or cost a worker, elsewhere in the same run."""
        elsewhere = self._run.context.elsewhere
        return [] if elsewhere is None else elsewhere.among([*self._run.notes.known])

    def _leased(self) -> list[Any]:
        """Return the leased rows if processes have died: among them may be rows that these held.

        Also those whose lease has lapsed: perhaps only after the run has looked for rows, so that
        it has not come to them.
        """
        lease = self._run.processor.lease
        if lease is None or not self._run.notes.deaths:
            return []
        # Race: poison row. Without its note, such a row would come first in the next run.
        held = self._run.ask(due=False).unfiltered.filter(lease.held()).order_by()
        return list(held.values_list("pk", flat=True)[:MOST_LOCKED])

    def _suspects_in_turn(self) -> list[Any]:
        return self._suspects.in_turn()

    def _without_suspects(self, waiting: deque[Any]) -> deque[Any]:
        for pk in self._suspects.among(waiting):
            waiting.remove(pk)
            self._tried.add(pk)
        return waiting

    def _visit(
        self, question: Question[Any], waiting: deque[Any], *, more: int
    ) -> tuple[int, int, bool]:
        """Dispatch the next batch, and take those that have ended.

        ``more``: how many extra candidates the batch may get, to replace rows that it misses.
        Returns how many rows were got, how many were missed, and whether those were replaced.
        """
        run = self._run
        in_flight = run.dispatcher.rows_in_flight
        size = run.limits.clip(run.dispatcher.room, run.counters.handled + in_flight)
        size = min(size, len(waiting))
        if self._alone and size > 0:
            size, more = self._clipped(size, more, waiting)
        if run.starts.is_shared and not run.starts.has_slot():
            # Only the end of the batches in flight is waited for.
            size = 0
        if run.processor._flip_needs_result and run.counters.is_to_be_careful:
            # A flip that needs the handler's result is known to be right only once it is written.
            size = min(size, max(0, 1 - in_flight))
        if run.starts.holds is not None and size > 0:
            size = run.starts.holds.take(size)
        is_redone, got, missed = False, 0, 0
        if size:
            pks = [waiting.popleft() for _ in range(min(size + more, len(waiting)))]
            # Race: poison row. A row that fails stays pending, and is not read again in this run.
            # Noted now, not when the batch ends, because the next window may be read before that.
            self._tried.update(pks)
            self._in_flight.update(pks)
            # After a row that is missed, the others that were rolled back with it come next, and no
            # new window.
            is_redone = pks[0] in self._alone
            batch: Batch[Any] = Batch(run.context, question, Wanted(pks, size))
            if run.starts.holds is not None:
                batch.window = run.starts.holds.window
            run.dispatcher.begin(batch)
            if batch.is_unconfirmed:
                got, missed = self._count_claim(batch, waiting)
        # Without room for a row, only the end of the batches in flight shows if the limit is met.
        more_got, more_missed = self.take(run.dispatcher.ended(everything=not size), waiting)
        got, missed = got + more_got, missed + more_missed
        return got, 0 if is_redone else missed, bool(more and got == size)

    def _clipped(self, size: int, more: int, waiting: deque[Any]) -> tuple[int, int]:
        """Return how many of the waiting rows the next batch may take, and choose among."""
        # A row that is to be redone is alone in its batch.
        among = itertools.islice(waiting, size + more)
        before = next((place for place, pk in enumerate(among) if pk in self._alone), None)
        if before is None:
            return size, more
        return (min(size, before), 0) if before else (1, 0)

    def take(
        self, ended: Iterable[Batch[Any]], waiting: deque[Any] | None = None
    ) -> tuple[int, int]:
        """Count the batches that have ended; the rows that they did not reach wait again.

        Returns how many rows were got, and how many were missed.
        """
        got = missed = 0
        counters = self._run.counters
        for batch in ended:
            if not batch.is_counted:
                more_got, more_missed = self._count_claim(batch, waiting)
                got, missed = got + more_got, missed + more_missed
            self._in_flight.difference_update(batch.wanted.pks)
            for pk, outcome in batch.outcomes.items():
                counters.count(pk, outcome)
                if counters.streak.succeeded:
                    self._failing.clear()
                elif len(self._failing) < MOST_LOCKED:
                    self._failing.add(pk)
            if self._run.starts.holds is not None:
                not_started = batch.wanted.limit - len(batch.outcomes)
                self._run.starts.holds.give_back(not_started, batch.window)
            self._alone.difference_update(batch.wanted.pks)
            self._alone.update(batch.to_redo)
            self._give_back([pk for pk in batch.rows if pk not in batch.outcomes], waiting)
        return got, missed

    def _count_claim(self, batch: Batch[Any], waiting: deque[Any] | None) -> tuple[int, int]:
        """Count the rows that a claim missed; those that it did not reach wait again."""
        batch.is_counted = True
        for pk, miss in batch.misses.items():
            if miss is Miss.ABSENT:
                self._absent.append(pk)
            elif miss is Miss.STALE:
                self._run.counters.counts["stale"] += 1
        known = batch.rows.keys() | batch.misses.keys() | batch.outcomes.keys()
        behind = [pk for pk in batch.wanted.pks if pk not in known]
        self._in_flight.difference_update(behind)
        self._give_back(behind, waiting)
        return len(batch.rows), len(batch.misses)

    def _give_back(self, pks: list[Any], waiting: deque[Any] | None) -> None:
        if waiting is not None and pks:
            self._tried.difference_update(pks)
            waiting.extendleft(reversed(pks))

    def _look_at_absent(self, question: Question[Any]) -> None:
        """Remember the rows that other workers have locked, and count those that are finished.

        SKIP LOCKED returns neither of them, and only locked rows are worth coming back to. If there
        are any such rows, one query per window, without a lock, finds which of them are locked.
        """
        absent, self._absent = self._absent, []
        self._run.dispatcher.confirm()
        locked = scan.still_pending(question, absent)
        self._run.counters.counts["stale"] += len(absent) - len(locked)
        room = MOST_LOCKED - len(self._locked)
        self._locked += locked[:room]
        self._run.counters.counts["skipped"] += len(locked[room:])
