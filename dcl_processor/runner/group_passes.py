"""The passes of a run over groups: keys take turns, and one batch of a key is in flight at a time.

A key that another worker has locked is visited again later. A key is held until the next run if its
next row has failed, waits, or is in doubt. It is also held if another worker has the lease of that
row, because that worker continues with the key.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from django.db.models import Q

from dcl_processor.candidates import groups as reads
from dcl_processor.candidates import scan
from dcl_processor.candidates.question import Question
from dcl_processor.definition.groups import Groups, Key
from dcl_processor.delivery.batch import Batch
from dcl_processor.execution.calls import each_beside
from dcl_processor.execution.handler import Handled
from dcl_processor.locking.claiming import Miss
from dcl_processor.locking.key_lock import refuse_collation
from dcl_processor.locking.wanted import Wanted

from .counters import MOST_KEYS
from .passes import MOST_LOCKED, READ, Passes
from .turns import Turn, Turns

if TYPE_CHECKING:
    from .run import Run

#: Keys in line below which the next window of keys is read, so that no key has to be drained first.
FEW_KEYS = reads.KEYS // 2


class GroupPasses(Passes):
    """Visits the keys in line, and notes what became of the batches."""

    def __init__(self, run: Run[Any], groups: Groups) -> None:
        super().__init__(run)
        self._groups = groups
        self._ask = partial(run.ask, among=Q(**{f"{groups.column}__isnull": True}))
        self._question: Question[Any] | None = None
        self._turns = Turns(groups)
        self._last: list[Turn] = []
        #: Rows that are handled last, of keys.
        self._suspected: set[Any] = set()
        #: Rows that a claim has missed, and why: other sessions hold them or their keys, or have
        #: finished them.
        self._missed: dict[Any, Miss] = {}
        self._look_at = scan.WINDOW

    def first(self) -> None:
        """Visit the rows of every key, and then the rows without a key."""
        walk = reads.KeyWalk(self._run.ask, self._groups)
        windows = each_beside(self._run.processor.name, READ, walk)
        self._read_keys(windows, is_first=True)
        if self._turns.line or not walk.has_rows_without:
            self._run.counters.passes += 1
        self._take_turns(windows)
        if walk.has_rows_without and not self._run.must_stop():
            super().first()

    def later(self) -> None:
        """Come back to the keys that other sessions had locked, and only to those."""
        super().later()
        waits = self._run.limits.waits()
        while self._turns.busy and not self._run.must_stop() and next(waits, False):
            self._run.counters.passes += 1
            before = self._run.counters.handled
            self._question = self._run.ask()
            self._turns.join_busy()
            self._take_turns(iter(()))
            if self._run.counters.handled > before:
                waits = self._run.limits.waits()

    def refuse_spellings(self, question: Question[Any]) -> None:
        """Raise ``Unsupported`` if equal keys may have several spellings; asked of the database."""
        refuse_collation(question, self._groups, self._run.processor.name)

    def last(self) -> None:
        """Handle the keys whose rows were in flight when their process died, and count the held."""
        for turn in sorted(self._last, key=lambda turn: self._suspects.deaths_with(turn.suspects)):
            if self._run.must_stop():
                break
            turn.is_last = True
            self._turns.join(turn)
            self._take_turns(iter(()))
        not_free = {**self._turns.held, **self._turns.busy}
        turns = list(not_free.values())
        self._left_suspects = [pk for turn in turns for pk in turn.suspects]
        question = self._run.ask() if self._missed or turns else None
        if question is not None:
            self._look_at_missed(question)
            self._count_held(question, turns)
        super().last()

    def _look_at_missed(self, question: Question[Any]) -> None:
        """Count the missed rows that are finished, and forget them; one query per window."""
        missed = list(self._missed)
        for at in range(0, len(missed), scan.WINDOW):
            some = missed[at : at + scan.WINDOW]
            for pk in set(some).difference(scan.still_pending(question, some)):
                del self._missed[pk]
                self._run.counters.counts["stale"] += 1
        # Many may stay pending, and are not to be looked up again for each row.
        self._look_at = 2 * max(scan.WINDOW, len(self._missed))

    def _count_held(self, question: Question[Any], turns: list[Turn]) -> None:
        """Count the rows of these keys that were not tried, apart from those that are locked."""
        locked = {pk for pk, miss in self._missed.items() if miss is Miss.ABSENT}
        self._run.counters.counts["skipped"] += len(locked)
        tried = {turn.key.value: turn.tried for turn in turns}
        held, keys = reads.count_due(
            question, self._groups, tried, without=locked, most_keys=MOST_KEYS
        )
        if held:
            self._run.counters.note_held(held, keys)

    def _suspects_in_turn(self) -> list[Any]:
        return [pk for pk in super()._suspects_in_turn() if pk not in self._suspected]

    # --- the line

    def _take_turns(self, windows: Iterator[tuple[Question[Any], list[Key]]]) -> None:
        """Visit the keys in line, one batch at a time, until none is left that can be visited."""
        run = self._run
        while not run.must_stop():
            if len(self._turns.line) < FEW_KEYS:
                self._read_keys(windows)
            if self._turns.line:
                turn = self._turns.line.popleft()
                if self._has_candidates(turn):
                    self._visit_key(turn)
                elif not turn.in_flight:
                    self._end(turn)
            elif self._turns.are_in_flight:
                self.take(run.dispatcher.ended(one=True))
            else:
                break
        self.take(run.dispatcher.ended(everything=True))
        self._turns.clear()

    def _end(self, turn: Turn) -> None:
        """Leave a key without rows, unless the COMMIT of its last batch fails."""
        last = self._run.context.transactions.unconfirmed
        is_its_own = last is not None and last.wanted.key == turn.key
        self.take(self._run.dispatcher.ended(everything=is_its_own))
        self._turns.end(turn)

    def _read_keys(
        self, windows: Iterator[tuple[Question[Any], list[Key]]], *, is_first: bool = False
    ) -> None:
        for self._question, keys in windows:
            if is_first:
                self._run.refuse_backlog(self._question)
                self.refuse_spellings(self._question)
                if self._groups.whole:
                    # Race: endless run. A key whose rows all arrived during this run is left to the
                    # next one: another worker may have called the handler for the key already.
                    self._turns.highest = scan.highest(self._question)
            for key in keys:
                self._turns.join(Turn(key))
            return

    def _has_candidates(self, turn: Turn) -> bool:
        """Return whether the key has rows to try; if it has none, it is over, busy or held."""
        question = self._question
        assert question is not None
        called = self._run.context.called
        if called is not None and called.among([turn.key.value]):
            # A claim would only show again that the key had its call in another worker.
            self._leave(turn)
        if not self._turns.has_rows(question, turn):
            return False
        if not turn.is_last and (found := self._suspects.among(turn.waiting)):
            # Race: poison row. The rows behind one that killed a process wait with it.
            turn.suspects.update(found)
            self._suspected.update(found)
            self._last.append(turn)
            # Read again then; a key with rows in line would come back at once.
            turn.waiting.clear()
            turn.behind.clear()
            return False
        return True

    # --- one key

    def _visit_key(self, turn: Turn) -> None:
        """Dispatch the next batch of a key, and take the batches that have ended."""
        run, question = self._run, self._question
        assert question is not None
        size = min(self._room(turn), len(turn.waiting))
        if size <= 0:
            # Only the end of the batches in flight shows if the limit is met.
            self._turns.line.appendleft(turn)
            self.take(run.dispatcher.ended(everything=True))
            return
        if len(self._missed) >= self._look_at:
            self._look_at_missed(question)
        pks = [turn.waiting.popleft() for _ in range(size)]
        if self._groups.whole and pks[0] not in self._alone:
            # One call for a key and run: what is left of a capped one waits for the next run.
            self._leave(turn)
        batch: Batch[Any] = Batch(run.context, question, Wanted(pks, key=turn.key))
        if run.starts.holds is not None:
            batch.window = run.starts.holds.window
        turn.in_flight += 1
        if (turn.waiting or turn.behind) and turn.in_flight < self._most_batches:
            self._turns.line.append(turn)
        run.dispatcher.begin(batch)
        if batch.is_unconfirmed:
            # Its COMMIT is sent before the next claim, and releases the key's lock.
            self._count_claim(batch, turn.waiting)
        self.take(run.dispatcher.ended())

    @property
    def _most_batches(self) -> int:
        """Return how many batches of one key may be in flight."""
        several = self._groups.most is not None and self._run.event_loop is None
        return self._groups.most or 1 if several else 1

    def _room(self, turn: Turn) -> int:
        """Return how many rows the next batch of a key may have."""
        run, in_flight = self._run, self._run.dispatcher.rows_in_flight
        size = run.limits.clip(self._size(turn), run.counters.handled + in_flight)
        if self._groups.whole and size > 0:
            size = self._size(turn)  # a limit does not split what is handled together
        if turn.waiting[0] in self._alone:
            size = min(size, 1)
        elif self._alone and any(pk in self._alone for pk in turn.waiting):
            size = min(size, next(n for n, pk in enumerate(turn.waiting) if pk in self._alone))
        if run.starts.is_shared and not run.starts.has_slot():
            size = 0
        is_careful = run.processor._flip_needs_result and run.counters.is_to_be_careful
        if is_careful and not self._groups.whole:
            size = min(size, max(0, 1 - in_flight))
        if run.starts.holds is not None and size > 0:
            wanted = min(size, len(turn.waiting))
            size = run.starts.holds.take(wanted, whole=self._groups.whole)
        return size

    def _size(self, turn: Turn) -> int:
        batch_size = self._run.processor.batch_size
        if self._groups.whole:
            return len(turn.waiting) if batch_size == 1 else batch_size
        if self._run.event_loop is not None or self._run.context.hand_over is not None:
            # The rows of a batch are handled at the same time.
            return self._groups.most or 1
        return batch_size

    # --- what became of it

    def take(
        self, ended: Iterable[Batch[Any]], waiting: deque[Any] | None = None
    ) -> tuple[int, int]:
        """Count the batches that have ended; the rows that they did not reach wait again."""
        got = missed = 0
        for batch in ended:
            turn = self._turns.of(batch.wanted.key)
            counted = super().take([batch], waiting if turn is None else turn.waiting)
            got, missed = got + counted[0], missed + counted[1]
            if turn is not None:
                self._note_outcomes(turn, batch)
        return got, missed

    def _note_outcomes(self, turn: Turn, batch: Batch[Any]) -> None:
        stay = self._run.processor.repeats
        not_handled = [pk for pk, each in batch.outcomes.items() if not isinstance(each, Handled)]
        turn.tried.update(batch.outcomes if stay else not_handled)
        again = batch.rows.keys() - batch.outcomes.keys()
        turn.tried -= again
        if turn.left is not None:
            # They are claimed, and so counted, once more.
            turn.left += len(again)
        # In order, whether the next row may be tried depends on what became of this one.
        turn.is_old = turn.is_old or (self._groups.in_order and bool(not_handled))

    def _count_claim(self, batch: Batch[Any], waiting: deque[Any] | None) -> tuple[int, int]:
        """Count the rows that a claim missed, and put its key back in line if it is free."""
        turn = self._turns.of(batch.wanted.key)
        if turn is None:
            return super()._count_claim(batch, waiting)
        batch.is_counted = True
        known = batch.rows.keys() | batch.misses.keys() | batch.outcomes.keys()
        self._give_back([pk for pk in batch.wanted.pks if pk not in known], turn.waiting)
        turn.in_flight -= 1
        turn.left = (turn.left or 0) - len(batch.rows)
        if batch.question.read_using != batch.question.using and not self._groups.in_order:
            # A replica that is late shows them again, perhaps before their outcomes are known.
            turn.tried |= batch.rows.keys()
        self._note_missed(batch)
        missed = set(batch.misses.values())
        if Miss.CALLED in missed:
            self._leave(turn)
            if turn not in self._turns.line:
                self._turns.join(turn)
        elif Miss.KEY_IN_USE in missed:
            self._turns.hold(turn)
        elif missed & {Miss.KEY_LOCKED, Miss.NOT_FIRST}:
            self._turns.busy_later(turn)
        else:
            because: dict[Miss, set[Any]] = defaultdict(set)
            for pk, miss in batch.misses.items():
                because[miss].add(pk)
            self._run.counters.counts["stale"] += len(because[Miss.STALE])
            # A replica may show a finished row again and again.
            turn.tried |= because[Miss.TRIED] | because[Miss.STALE]
            turn.missed |= because[Miss.ABSENT]
            # Another worker had the key, and may have finished more of its rows.
            turn.is_old = turn.is_old or bool(missed and not self._groups.whole)
            self._rejoin(turn, batch)
        return len(batch.rows), len(batch.misses)

    def _note_missed(self, batch: Batch[Any]) -> None:
        for pk in batch.rows:
            self._missed.pop(pk, None)
        for pk, miss in batch.misses.items():
            if miss in (Miss.STALE, Miss.TRIED, Miss.CALLED):
                self._missed.pop(pk, None)
            elif pk in self._missed or len(self._missed) < MOST_LOCKED:
                self._missed[pk] = miss

    def _leave(self, turn: Turn) -> None:
        """Leave the rest of a key that had its call to the next run."""
        turn.waiting.clear()
        turn.left = 0

    def _rejoin(self, turn: Turn, batch: Batch[Any]) -> None:
        """Put a key back in line; of one that is handled as a whole, rows may be locked."""
        if self._groups.whole and batch.misses:
            if batch.rows:
                self._turns.hold(turn)  # the handler was called for these
            elif self._turns.has_locked(batch.question, turn, turn.missed):
                self._turns.busy_later(turn)
                return
            else:
                turn.left = None  # the handler was not called for the key
        if turn not in self._turns.line:
            self._turns.join(turn)
