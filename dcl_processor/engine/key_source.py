"""The candidates of a run over groups: keys take turns, and one batch of a key is in flight.

A key that another worker has locked is visited again later. A key is held until the next run if its
next row has failed, waits, or is in doubt. It is also held if another worker has the lease of that
row, because that worker continues with the key. Rows without a key come last, as any rows do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from django.db.models import Q

from dcl_processor.candidates import groups as reads
from dcl_processor.candidates import scan
from dcl_processor.candidates.question import Question
from dcl_processor.definition.groups import Groups, Key
from dcl_processor.execution.handler import Handled, Outcome
from dcl_processor.locking.key_lock import refuse_collation
from dcl_processor.locking.wanted import Wanted
from dcl_processor.runner.counters import MOST_KEYS

from .settlement import Batch, Busy, Claimed
from .source import Source, Step
from .turns import MOST_KEPT, Turn, Turns

if TYPE_CHECKING:
    from .run import Run

#: Keys in line below which the next window of keys is read, so that no key has to be drained first.
FEW_KEYS = reads.KEYS // 2

#: Keys whose next rows are read at once; what the last batch has left to send goes before a read.
READY = 4


class _Ended:
    """What became of the rows of a batch; ``redone``: are to be handled again, alone."""

    def __init__(self, batch: Batch, redone: Sequence[Any]) -> None:
        claimed = batch.claimed or Claimed([])
        self.rows = {held.pk for held in claimed.rows}
        self.absent, self.stale, self.busy = {*claimed.absent}, {*claimed.stale}, claimed.busy
        self.outcomes = {held.pk: each for held, each in batch.ended if each is not None}
        self.redone = {*redone}


class KeySource(Source):
    """Gives rows of one key to the lanes of a run, or of several keys if they are handled at once.

    ``at_once``: the handlers of a batch's rows are under way at the same time.
    """

    def __init__(self, run: Run, question: Question[Any], groups: Groups, *, at_once: bool) -> None:
        super().__init__(run, question)
        self._groups = groups
        self._turns = Turns(groups)
        self._is_keyed = True
        self._at_once = at_once
        #: Whether a batch has rows of several keys.
        self._joins_keys = at_once and not groups.whole
        #: How many keys are read at once: while their handlers are at work, those that come next;
        #: rows that are handled together, as late as possible.
        self._ready = 1 if groups.whole else max(READY, run.concurrency if at_once else 1)
        #: Keys that are to be ready before the next batch of several; 0: it may be taken.
        self._to_be_ready = 0
        #: Keys whose rows are handled last, and these rows.
        self._last_turns: list[Turn] = []
        self._suspected: set[Any] = set()
        #: Rows that a claim has missed, and why, if that is known: other sessions hold them or
        #: their keys, or have finished them.
        self._not_got: dict[Any, Busy | None] = {}
        self._look_at = scan.WINDOW

    # --- what the lanes take

    def take(self, room: int) -> Batch | None:
        if not self._is_keyed:
            return super().take(room)
        with self._lock:
            ready = self._turns.ready
            if not self.has_candidates or room <= 0 or self._run.must_stop():
                return None
            if self._joins_keys and len(ready) < room and self._turns.line:
                self._to_be_ready = room
                return None
            keys: dict[Any, Key] = {}
            while ready and len(keys) < room:
                turn = ready[0]
                size = self._size(turn, room - len(keys))
                if size <= 0:
                    break
                ready.popleft()
                turn.is_in_line = False
                keys.update(dict.fromkeys(self._taken(turn, size), turn.key))
                if not self._joins_keys:
                    break
            holds = self._run.holds
            window = holds.window if holds is not None else 0
            return Batch(self.question, Wanted([*keys], keys=keys), window) if keys else None

    @property
    def has_candidates(self) -> bool:
        if not self._is_keyed:
            return super().has_candidates
        return bool(self._turns.ready) and not self._to_be_ready

    def _size(self, turn: Turn, room: int) -> int:
        """Return how many rows of a key the next batch may have."""
        whole, batch_size = self._groups.whole, self._run.processor.batch_size
        size = min(room, batch_size)
        if whole:
            size = len(turn.waiting) if batch_size == 1 else batch_size
        elif self._at_once:
            size = min(room, self._groups.most or 1)
        free = self._room(size)
        if free <= 0:
            return 0
        # A limit does not split what is handled together.
        size = min(size if whole else free, len(turn.waiting))
        if turn.alone:
            places = [place for place, pk in enumerate(turn.waiting) if pk in turn.alone]
            size = min([size, *(max(place, 1) for place in places)])
        holds = self._run.holds
        if holds is not None and (size := holds.take(size, whole=whole)) <= 0:
            self._is_held = True
        return size

    def _taken(self, turn: Turn, size: int) -> Sequence[Any]:
        """Take so many rows of a key, which goes on if more of its rows may be in flight."""
        pks = [turn.waiting.popleft() for _ in range(size)]
        self._in_flight.update(pks)
        turn.in_flight += 1
        if self._groups.whole and pks[0] not in turn.alone:
            # One call for a key and run: what is left of a capped one waits for the next run.
            turn.waiting.clear()
            turn.left = 0
        turn.alone.difference_update(pks)
        if turn.waiting or turn.behind:
            self._rejoin(turn)
        return pks

    def _rejoin(self, turn: Turn) -> None:
        """Put a key back in line unless as many of its batches as may be are in flight."""
        if turn.in_flight < (1 if self._at_once else self._groups.most or 1):
            self._turns.join(turn)

    # --- what became of them

    def expect(self, batch: Batch) -> None:
        """Go on with the keys of a batch whose end is sent before the next claim of its lane.

        Only if the run has one lane: another one would find the keys locked.
        """
        if not batch.wanted.keys or self._run.concurrency > 1:
            return
        with self._lock:
            ours = {held.pk for held in batch.rows}
            for turn, pks in self._turns_in(batch):
                if not (claimed := ours.intersection(pks)):
                    continue
                self._leave(turn, batch, claimed)
                if self._turns.line or turn.is_old or not turn.waiting:
                    self._rejoin(turn)
                elif not turn.is_in_line:
                    turn.is_in_line = True
                    self._turns.ready.append(turn)

    def settled(self, batch: Batch) -> None:
        """Go on with the keys whose rows are settled, while handlers of other rows are at work."""
        if not batch.wanted.keys:
            return
        # One with a row that was put back, or not claimed, goes on with the end of the batch, which
        # returns that row.
        settled = ((held, each) for held, each in batch.ended if held.marked.is_settled)
        ended = {held.pk: each for held, each in settled if each is not None}
        with self._lock:
            for turn, pks in self._turns_in(batch):
                if ended.keys() >= {*pks}:
                    self._leave(turn, batch, pks)
                    self._note_outcomes(turn, {pk: ended[pk] for pk in pks})
                    self._rejoin(turn)

    def _turns_in(self, batch: Batch) -> list[tuple[Turn, list[Any]]]:
        """Return the turns that a batch keeps out of the line, with its candidates of each."""
        by_key: dict[Any, list[Any]] = {}
        for pk, key in batch.wanted.keys.items():
            by_key.setdefault(key.value, []).append(pk)
        found = [(self._turns.of_value(value), pks) for value, pks in by_key.items()]
        return [
            (turn, pks)
            for turn, pks in found
            if turn is not None and turn.key.value not in batch.rejoined
        ]

    def _leave(self, turn: Turn, batch: Batch, pks: Collection[Any]) -> None:
        """Let a key go on although its batch has not ended; ``pks``: its claimed rows there."""
        batch.rejoined.add(turn.key.value)
        turn.in_flight -= 1
        turn.left = (turn.left or 0) - len(pks)

    def note_claim(self, batch: Batch) -> None:
        if not batch.wanted.keys:
            super().note_claim(batch)

    def give_back(self, batch: Batch, *, missed: bool = False) -> None:
        if not batch.wanted.keys:
            super().give_back(batch, missed=missed)
            return
        open_rows, known = self._open_rows(batch), batch.claimed or Claimed([])
        batch.claimed = Claimed([])
        if missed:
            absent = [*open_rows, *known.absent]
            batch.claimed = Claimed([], absent=absent, stale=known.stale, busy=known.busy)
        self.end(batch)

    def end(self, batch: Batch, redone: Sequence[Any] = ()) -> None:
        if not batch.wanted.keys:
            super().end(batch, redone)
            return
        with self._lock:
            if batch.is_counted:
                return
            self._count(batch)
            batch.is_counted = True
            self._in_flight.difference_update(batch.wanted.pks)
            ended = _Ended(batch, redone)
            self._give_tokens_back(batch, len(ended.outcomes))
            by_key: dict[Any, list[Any]] = {}
            for pk, key in batch.wanted.keys.items():
                by_key.setdefault(key.value, []).append(pk)
            for value, pks in by_key.items():
                turn = self._turns.of_value(value)
                if turn is not None:
                    self._end_of(turn, batch, pks, ended)
            self._lock.notify_all()

    def _end_of(self, turn: Turn, batch: Batch, pks: Sequence[Any], ended: _Ended) -> None:
        """Take note of what became of the rows of one key."""
        ours = set(pks)
        rows, absent, stale = ours & ended.rows, ours & ended.absent, ours & ended.stale
        busy = {pk: ended.busy[pk] for pk in pks if pk in ended.busy}
        if turn.key.value not in batch.rejoined:
            self._leave(turn, batch, rows)
        known = ended.outcomes.keys() | absent | stale | busy.keys()
        again = [pk for pk in pks if pk not in known]
        turn.waiting.extendleft(reversed(again))
        turn.alone.update(ours & ended.redone)
        # They are claimed, and so counted, once more.
        turn.left = (turn.left or 0) + len(rows.intersection(again))
        outcomes = {pk: ended.outcomes[pk] for pk in pks if pk in ended.outcomes}
        self._note_outcomes(turn, outcomes)
        self._note_missed(rows | stale, {**dict.fromkeys(absent), **busy})
        if Busy.IN_USE in busy.values():
            self._turns.hold(turn)
        elif busy:
            self._turns.busy_later(turn)
        else:
            self._run.counters.counts["stale"] += len(stale)
            turn.missed |= absent
            self._go_on(turn, has_rows=bool(rows), has_missed=bool(absent or stale))

    def _note_outcomes(self, turn: Turn, outcomes: Mapping[Any, Outcome]) -> None:
        not_handled = [pk for pk, each in outcomes.items() if not isinstance(each, Handled)]
        turn.tried.update(outcomes if self._run.processor.repeats else not_handled)
        # In order, whether the next row may be tried depends on what became of this one.
        turn.is_old = turn.is_old or (self._groups.in_order and bool(not_handled))

    def _note_missed(self, known: Collection[Any], missed: Mapping[Any, Busy | None]) -> None:
        for pk in known:
            self._not_got.pop(pk, None)
        for pk, why in missed.items():
            if pk in self._not_got or len(self._not_got) < MOST_KEPT:
                self._not_got[pk] = why

    def _go_on(self, turn: Turn, *, has_rows: bool, has_missed: bool) -> None:
        """Put a key back in line; of one that is handled as a whole, rows may be locked."""
        if self._groups.whole and has_missed:
            if not has_rows:
                turn.may_be_busy = True
            elif not turn.waiting:  # or those are to be redone alone
                self._turns.hold(turn)  # the handler was called for these
                return
        elif has_missed:
            # Another worker had the key, and may have finished more of its rows.
            turn.is_old = True
        self._rejoin(turn)

    # --- the order

    def _ask(self) -> Question[Any]:
        """Return the question for the rows without a key."""
        return self._run.ask(among=Q(**{f"{self._groups.column}__isnull": True}))

    def _first(self) -> Iterator[Step]:
        """Visit the rows of every key, and then the rows without a key."""
        run = self._run
        walk = reads.KeyWalk(run.ask, self._groups)
        windows = iter(walk)
        self._read_keys(windows, is_first=True)
        if self._turns.line or not walk.has_rows_without:
            run.counters.passes += 1
        yield from self._visits(windows)
        if walk.has_rows_without and not run.must_stop():
            self._is_keyed = False
            yield from super()._first()
            self._is_keyed = True

    def _later(self) -> Iterator[Step]:
        """Come back to the rows and the keys that other sessions had locked, and only to those."""
        run = self._run
        self._is_keyed = False
        yield from super()._later()
        self._is_keyed = True
        waits = run.limits.waits()
        # A lane of this run may have had the key locked, and that is no lock to wait for.
        may_be_own = run.concurrency > 1 and (self._groups.most or 1) > 1
        while self._turns.busy and not run.must_stop() and (may_be_own or next(waits, False)):
            run.counters.passes += 1
            before = run.counters.handled
            self.question = run.ask()
            self._turns.join_busy()
            yield from self._visits(iter(()))
            if run.counters.handled > before:
                waits = run.limits.waits()
            else:
                may_be_own = False

    def _last(self) -> Iterator[Step]:
        """Handle the keys whose rows were in flight when their process died."""
        died, left = self._notes.last_death, {*self._notes.left()}
        for turn in sorted(self._last_turns, key=lambda turn: died(turn.suspects)):
            if self._run.must_stop():
                return
            if turn.suspects & left:
                self._turns.hold(turn)
                continue
            turn.is_last, self.question = True, self._run.ask()
            self._turns.join(turn)
            yield from self._visits(iter(()))
        self._is_keyed = False
        yield from super()._last()

    def _visits(self, windows: Iterator[tuple[Question[Any], list[Key]]]) -> Iterator[Step]:
        """Let the keys take turns until none is left that can be visited."""
        turns = self._turns
        while not self._run.must_stop():
            if len(turns.line) < FEW_KEYS:
                self._read_keys(windows)
            while turns.line and len(turns.ready) < max(self._ready, self._to_be_ready):
                self._prepare(turns.line.popleft())
            self._to_be_ready = 0
            if turns.ready:
                yield Step.GO_ON
            elif turns.are_in_flight:
                yield Step.WAIT
            else:
                break
        turns.clear()

    def _read_keys(
        self, windows: Iterator[tuple[Question[Any], list[Key]]], *, is_first: bool = False
    ) -> None:
        for self.question, keys in windows:
            if is_first:
                self._run.refuse_backlog(self.question)
                refuse_collation(self.question, self._groups, self._run.processor.name)
                if self._groups.whole:
                    # Race: endless run. A key whose rows all arrived during this run is left to the
                    # next one: another worker may have called the handler for the key already.
                    self._turns.highest = scan.highest(self.question)
            for key in keys:
                self._turns.join(Turn(key))
            return

    def _prepare(self, turn: Turn) -> None:
        """Read the next rows of a key that was in line; one without is over, busy or held."""
        turn.is_in_line = False
        if len(self._not_got) >= self._look_at:
            self._look_at_missed(self.question)
        if self._has_rows(turn):
            turn.is_in_line = True
            self._turns.ready.append(turn)
        elif not turn.in_flight:
            self._turns.end(turn)

    def _has_rows(self, turn: Turn) -> bool:
        """Return whether the key has rows to try."""
        if turn.may_be_busy:
            turn.may_be_busy = False
            if self._turns.has_locked(self.question, turn):
                self._turns.busy_later(turn)
                return False
            turn.left = None  # the handler was not called for the key
        if not self._turns.has_rows(self.question, turn):
            return False
        found = [] if turn.is_last else self._notes.among(turn.waiting)
        if found:
            # Race: poison row. The rows behind one that killed a process wait with it.
            turn.suspects.update(found)
            self._suspected.update(found)
            self._last_turns.append(turn)
            # Read again then; a key with rows in line would come back at once.
            turn.waiting.clear()
            turn.behind.clear()
        return not found

    # --- the end

    def _suspects_in_turn(self) -> list[Any]:
        return [pk for pk in super()._suspects_in_turn() if pk not in self._suspected]

    def _left_suspects(self) -> list[Any]:
        turns = {**self._turns.held, **self._turns.busy}.values()
        return [*super()._left_suspects(), *[pk for turn in turns for pk in turn.suspects]]

    def finish(self) -> None:
        turns = [*{**self._turns.held, **self._turns.busy}.values()]
        if self._not_got or turns:
            question = self._run.ask()
            self._look_at_missed(question)
            self._count_held(question, turns)
        super().finish()

    def _look_at_missed(self, question: Question[Any]) -> None:
        """Count the missed rows that are finished, and forget them; one query per window."""
        missed = list(self._not_got)
        for at in range(0, len(missed), scan.WINDOW):
            some = missed[at : at + scan.WINDOW]
            for pk in set(some).difference(scan.still_pending(question, some)):
                del self._not_got[pk]
                self._run.counters.counts["stale"] += 1
        # Many may stay pending, and are not to be looked up again for each row.
        self._look_at = 2 * max(scan.WINDOW, len(self._not_got))

    def _count_held(self, question: Question[Any], turns: Sequence[Turn]) -> None:
        """Count the rows of these keys that were not tried, apart from those that are locked."""
        locked = {pk for pk, why in self._not_got.items() if why is None}
        self._run.counters.counts["skipped"] += len(locked)
        tried = {turn.key.value: turn.tried for turn in turns}
        held, keys = reads.count_due(
            question, self._groups, tried, without=locked, most_keys=MOST_KEYS
        )
        if held:
            self._run.counters.note_held(held, keys)
