"""The candidates of a run over groups: keys take turns, and one batch of a key is in flight.

A key that another worker has locked is visited again later. A key is held until the next run if its
next row has failed, waits, or is in doubt. It is also held if another worker has the lease of that
row, because that worker continues with the key. Rows without a key come last, as any rows do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from django.db.models import Q

from dcl_processor.candidates import groups as reads
from dcl_processor.candidates import scan
from dcl_processor.candidates.question import Question
from dcl_processor.definition.groups import Groups, Key
from dcl_processor.execution.handler import Handled, Outcome
from dcl_processor.locking.key_lock import refuse_collation
from dcl_processor.runner.counters import MOST_KEYS

from .settlement import Batch, Claimed, Missed, Wanted
from .source import Source, Step
from .turns import MOST_KEPT, Share, Turn, Turns

if TYPE_CHECKING:
    from .run import Run

#: Keys whose next rows are read at once.
READY = 4


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
        #: How many keys are read at once: while their handlers are at work, those that come next.
        self._ready = max(READY, run.concurrency if at_once else 1)
        #: Keys whose rows are handled last.
        self._last_turns: list[Turn] = []
        #: Rows that a claim has missed, and why: other sessions hold them or their keys, or have
        #: finished them.
        self._not_got: dict[Any, Missed] = {}
        self._look_at = scan.WINDOW

    # --- what the lanes take

    def take(self, room: int) -> Batch | None:
        with self._lock:
            # Another lane may have gone on from the keys to the rows without one.
            if not self._is_keyed:
                return super().take(room)
            if not self.has_candidates or room <= 0 or self._run.must_stop():
                return None
            sizes, overseer = self._sizes(room), self._run.overseer
            left = sum(sizes)
            if overseer is not None and left:
                left = overseer.take(left)
                self._is_held = left <= 0
            shares: list[Share] = []
            while left > 0:
                size = min(sizes[len(shares)], left)
                shares.append(self._taken(self._turns.ready.popleft(), size))
                left -= size
            if not shares:
                return None
            keys = {pk: share.turn.key for share in shares for pk in share.pks}
            window = overseer.window if overseer is not None else 0
            return Batch(self.question, Wanted([*keys], keys=keys), window, shares=shares)

    @property
    def has_candidates(self) -> bool:
        return bool(self._turns.ready) if self._is_keyed else super().has_candidates

    def _sizes(self, room: int) -> list[int]:
        """Return how many rows the next batch may have of each key that is ready."""
        turns, batch_size = [*self._turns.ready], self._run.processor.batch_size
        if turns[0].alone:
            # Race: poison row. One that makes its claim fail is found when it is alone.
            most, turns = 1, turns[:1]
        elif self._at_once:
            most = self._groups.most or 1
            turns = [*takewhile(lambda turn: not turn.alone, turns)]
        else:
            most, turns = batch_size, turns[:1]
        free, sizes = max(self._room(room), 0), list[int]()
        for turn in turns:
            sizes.append(min(most, free, len(turn.next_rows)))
            free -= sizes[-1]
        return sizes

    def _taken(self, turn: Turn, size: int) -> Share:
        """Take so many rows of a key, which goes on if more of its rows may be in flight."""
        rows = turn.next_rows
        pks = [rows.popleft() for _ in range(size)]
        self._in_flight.update(pks)
        turn.in_flight, turn.is_in_line = turn.in_flight + 1, False
        if turn.next_rows:
            self._rejoin(turn)
        return Share(turn, pks)

    def _rejoin(self, turn: Turn) -> None:
        """Put a key back in line unless as many of its batches as may be are in flight."""
        if turn.in_flight < (1 if self._at_once else self._groups.most or 1):
            self._turns.join(turn)

    # --- what became of them

    def settled(self, batch: Batch) -> None:
        """Go on with the keys whose rows are settled, while handlers of other rows are at work."""
        outcomes = {h.pk: each for h, each in batch.ended if each is not None}
        settled = {h.pk for h, _ in batch.ended if h.marked.is_settled and h.pk in outcomes}
        at_work = {held.pk for held in batch.rows} - settled
        with self._lock:
            for share in [*batch.shares]:
                # Race: double claim. What becomes of the rows of a key in a batch is noted once,
                # and for all of them. The key would read a row again that its batch still has.
                if at_work.isdisjoint(share.pks):
                    self._end_of(share, batch, outcomes)
            self._lock.notify_all()

    def _leave(self, share: Share) -> None:
        if not share.has_left:
            share.has_left = True
            share.turn.in_flight -= 1

    def note_claim(self, batch: Batch) -> None:
        if not batch.wanted.keys:
            super().note_claim(batch)

    def give_back(self, batch: Batch, *, missed: bool = False) -> None:
        if not batch.wanted.keys:
            super().give_back(batch, missed=missed)
            return
        known = batch.claimed.missed if batch.claimed is not None else {}
        absent = dict.fromkeys(self._open_rows(batch), Missed.ABSENT)
        batch.claimed = Claimed([], {**known, **absent} if missed else {})
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
            outcomes = {held.pk: each for held, each in batch.ended if each is not None}
            for share in [*batch.shares]:
                self._end_of(share, batch, outcomes, redone)
            self._in_flight.difference_update(outcomes)
            self._give_tokens_back(batch, len(outcomes))
            self._lock.notify_all()

    def _end_of(
        self,
        share: Share,
        batch: Batch,
        outcomes: Mapping[Any, Outcome],
        redone: Collection[Any] = (),
    ) -> None:
        """Take note of what became of the rows of one key, each of which has ended."""
        batch.shares.remove(share)
        self._leave(share)
        turn, known = share.turn, batch.claimed.missed if batch.claimed is not None else {}
        missed = {pk: known[pk] for pk in share.pks if pk in known}
        ended = {pk: outcomes[pk] for pk in share.pks if pk in outcomes}
        again = [pk for pk in share.pks if pk not in ended and pk not in missed]
        # Those that have ended are in the report, and in flight until the end of the batch.
        self._in_flight.difference_update(missed, again)
        alone = {*redone}
        turn.alone.extend(pk for pk in again if pk in alone)
        turn.waiting.extendleft(pk for pk in reversed(again) if pk not in alone)
        turn.left = (turn.left or 0) - len(ended)
        self._note_outcomes(turn, ended)
        self._note_missed(share.pks, missed)
        turn.missed.update(pk for pk, why in missed.items() if why is Missed.ABSENT)
        reasons = {*missed.values()}
        if Missed.IN_USE in reasons:
            self._turns.hold(turn)
        elif not reasons <= {Missed.ABSENT, Missed.STALE}:
            self._turns.busy_later(turn)
        else:
            # Another worker had the key, and may have finished more of its rows.
            turn.is_old = turn.is_old or bool(missed)
            self._rejoin(turn)

    def _note_outcomes(self, turn: Turn, outcomes: Mapping[Any, Outcome]) -> None:
        not_handled = [pk for pk, each in outcomes.items() if not isinstance(each, Handled)]
        turn.tried.update(not_handled)
        # In order, whether the next row may be tried depends on what became of this one.
        turn.is_old = turn.is_old or (self._groups.in_order and bool(not_handled))

    def _note_missed(self, pks: Sequence[Any], missed: Mapping[Any, Missed]) -> None:
        for pk in pks:
            why = missed.get(pk, Missed.STALE)
            if why is Missed.STALE:
                self._not_got.pop(pk, None)
                self._run.counters.counts["stale"] += pk in missed
            elif pk in self._not_got or len(self._not_got) < MOST_KEPT:
                self._not_got[pk] = why

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
            if not self._groups.in_order:
                turn.alone.extend(sorted(turn.suspects, key=lambda pk: died([pk])))
                turn.left = None
            self._turns.join(turn)
            yield from self._visits(iter(()))
        self._is_keyed = False
        yield from super()._last()

    def _visits(self, windows: Iterator[tuple[Question[Any], list[Key]]]) -> Iterator[Step]:
        """Let the keys take turns until none is left that can be visited."""
        turns = self._turns
        while not self._run.must_stop():
            while len(turns.ready) < self._ready and (turn := self._next_turn(windows)):
                self._prepare(turn)
            if turns.ready:
                yield Step.GO_ON
            elif self._in_flight:
                yield Step.WAIT
            else:
                break

    def _next_turn(self, windows: Iterator[tuple[Question[Any], list[Key]]]) -> Turn | None:
        """Return the next key in line; ``None``: none is left, in the line or behind it."""
        line = self._turns.line
        # A second turn of a key comes after the first one of all others, as far as these fit in.
        while not line or (line[0].left is not None and len(line) < MOST_KEPT):
            if self._run.must_stop() or not self._read_keys(windows):
                break
        return line.popleft() if line else None

    def _read_keys(
        self, windows: Iterator[tuple[Question[Any], list[Key]]], *, is_first: bool = False
    ) -> bool:
        """Put the next keys at the head of the line; return whether there were any."""
        for self.question, keys in windows:
            if is_first:
                self._run.refuse_backlog(self.question)
                refuse_collation(self.question, self._groups, self._run.processor.name)
            self._turns.line.extendleft(Turn(key, is_in_line=True) for key in reversed(keys))
            return True
        return False

    def _prepare(self, turn: Turn) -> None:
        """Read the next rows of a key that was in line; one without is over, busy or held."""
        turn.is_in_line = False
        if len(self._not_got) >= self._look_at:
            self._look_at_missed(self.question)
        if self._has_rows(turn):
            turn.is_in_line = True
            self._turns.ready.append(turn)

    def _has_rows(self, turn: Turn) -> bool:
        """Return whether the key has rows to try."""
        while self._turns.has_rows(self.question, turn):
            found = [] if turn.is_last else self._notes.among(turn.waiting)
            if not found:
                return True
            # Race: poison row. One that killed a process waits until all others were tried.
            if not turn.suspects:
                self._last_turns.append(turn)
            turn.suspects.update(found)
            if self._groups.in_order:
                # The rows behind it wait with it. Read again then; a key with rows in line would
                # come back at once.
                turn.waiting.clear()
                return False
            turn.tried.update(found)
            turn.waiting = deque(pk for pk in turn.waiting if pk not in turn.suspects)
        return False

    # --- the end

    def _suspects_in_turn(self) -> list[Any]:
        with_their_keys = {pk for turn in self._last_turns for pk in turn.suspects}
        return [pk for pk in super()._suspects_in_turn() if pk not in with_their_keys]

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
        for pk in self._not_got.keys() - scan.still_pending(question, self._not_got):
            del self._not_got[pk]
            self._run.counters.counts["stale"] += 1
        # Many may stay pending, and are not to be looked up again for each row.
        self._look_at = 2 * max(scan.WINDOW, len(self._not_got))

    def _count_held(self, question: Question[Any], turns: Sequence[Turn]) -> None:
        """Count the rows of these keys that were not tried, apart from those that are locked."""
        locked = {pk for pk, why in self._not_got.items() if why is Missed.ABSENT}
        self._run.counters.counts["skipped"] += len(locked)
        tried = {turn.key.value: turn.tried for turn in turns}
        held, keys = reads.count_due(
            question, self._groups, tried, without=locked, most_keys=MOST_KEYS
        )
        if held:
            self._run.counters.note_held(held, keys)
