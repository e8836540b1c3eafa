"""The passes of a run over groups: keys take turns, and one batch of a key is in flight at a time.

A key whose turn it is gives its next rows, and goes to the end of the line. So a key with most of
the rows holds up no other. A key that another worker has locked is visited again later. One whose
next row failed, waits or is in doubt is held until the next run; so is one whose next row has the
lease of another worker, which goes on with the key itself.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from django.db.models import Q

from dcl_processor.candidates import groups as reads
from dcl_processor.candidates import scan
from dcl_processor.candidates.question import Question
from dcl_processor.definition.groups import Groups, Key
from dcl_processor.delivery.batch import Batch
from dcl_processor.execution.handler import Handled
from dcl_processor.locking.claiming import Miss
from dcl_processor.locking.key_lock import refuse_collation
from dcl_processor.locking.wanted import Wanted

from .passes import MOST_LOCKED, Passes

if TYPE_CHECKING:
    from .run import Run

#: Keys in line below which the next window of keys is read, so that no key has to be drained first.
FEW_KEYS = reads.KEYS // 2


@dataclass(eq=False, slots=True)
class Turn:
    """A key in line.

    ``waiting``: its next rows. ``left``: rows that the run may still take of it; ``None``: not
    counted yet. ``tried``: rows that may be pending although they were handled; ``missed``: those
    that another session has locked. ``in_flight``: batches. ``is_old``: ``waiting`` is to be read
    again. ``suspects``: rows that may kill the process; ``is_last``: all others were handled.
    """

    key: Key
    waiting: deque[Any] = field(default_factory=deque)
    left: int | None = None
    tried: set[Any] = field(default_factory=set)
    missed: set[Any] = field(default_factory=set)
    in_flight: int = 0
    is_old: bool = False
    suspects: set[Any] = field(default_factory=set)
    is_last: bool = False


class GroupPasses(Passes):
    """Keeps track of the keys of a run: in line, in flight, busy, and held."""

    def __init__(self, run: Run[Any], groups: Groups) -> None:
        super().__init__(run)
        self._groups = groups
        self._ask = partial(run.ask, among=Q(**{f"{groups.column}__isnull": True}))
        self._question: Question[Any] | None = None
        self._line: deque[Turn] = deque()
        #: Every key that is in line or in flight, by its value.
        self._turns: dict[Any, Turn] = {}
        self._busy: dict[Any, Turn] = {}
        self._held: dict[Any, Turn] = {}
        self._last: list[Turn] = []
        #: Rows that are handled last, of keys.
        self._suspected: set[Any] = set()
        self._highest: Any = None

    def first(self) -> None:
        """Visit the rows of every key, and then the rows without a key."""
        walk = reads.KeyWalk(self._run.ask, self._groups)
        windows = iter(walk)
        self._read_keys(windows, is_first=True)
        if self._line or not walk.has_rows_without:
            self._run.counters.passes += 1
        self._take_turns(windows)
        if walk.has_rows_without and not self._run.must_stop():
            super().first()

    def later(self) -> None:
        """Come back to the keys that other sessions had locked, and only to those."""
        super().later()
        waits = self._run.limits.waits()
        while self._busy and not self._run.must_stop() and next(waits, False):
            self._run.counters.passes += 1
            before = self._run.counters.handled
            self._question = self._run.ask()
            turns, self._busy = list(self._busy.values()), {}
            for turn in turns:
                turn.missed.clear()
                turn.is_old = True
                self._join(turn)
            self._take_turns(iter(()))
            if self._run.counters.handled > before:
                waits = self._run.limits.waits()

    def last(self) -> None:
        """Handle the keys whose rows were in flight when their process died, and count the held."""
        for turn in self._last:
            if self._run.must_stop():
                break
            turn.is_last = True
            self._join(turn)
            self._take_turns(iter(()))
        not_free = {**self._held, **self._busy}
        turns = list(not_free.values())
        self._left_suspects = [pk for turn in turns for pk in turn.suspects]
        if turns:
            failed = [pk for turn in turns for pk in turn.tried][:MOST_LOCKED]
            values = list(not_free)
            held = reads.count_due(self._run.ask(), self._groups, values, without=failed)
            if held:
                self._run.counters.note_held(held, values)
        super().last()

    def _suspects_in_turn(self) -> list[Any]:
        return [pk for pk in super()._suspects_in_turn() if pk not in self._suspected]

    # --- the line

    def _take_turns(self, windows: Iterator[tuple[Question[Any], list[Key]]]) -> None:
        """Visit the keys in line, one batch at a time, until none is left that can be visited."""
        run = self._run
        while not run.must_stop():
            if len(self._line) < FEW_KEYS:
                self._read_keys(windows)
            if self._line:
                turn = self._line.popleft()
                if self._has_candidates(turn):
                    self._visit_key(turn)
                elif not turn.in_flight:
                    self._end(turn)
            elif self._turns:
                self.take(run.dispatcher.ended(one=True))
            else:
                break
        self.take(run.dispatcher.ended(everything=True))
        self._line.clear()
        self._turns.clear()

    def _end(self, turn: Turn) -> None:
        """Leave a key without rows, unless the COMMIT of its last batch fails."""
        last = self._run.context.transactions.unconfirmed
        is_its_own = last is not None and last.wanted.key == turn.key
        self.take(self._run.dispatcher.ended(everything=is_its_own))
        if not turn.waiting:
            self._turns.pop(turn.key.value, None)
        elif turn not in self._line:
            self._line.append(turn)

    def _read_keys(
        self, windows: Iterator[tuple[Question[Any], list[Key]]], *, is_first: bool = False
    ) -> None:
        for self._question, keys in windows:
            if is_first:
                self._run.refuse_backlog(self._question)
                refuse_collation(self._question, self._groups, self._run.processor.name)
                if self._groups.whole:
                    # Race: endless run. A key whose rows all arrived during this run is left to the
                    # next one: another worker may have called the handler for the key already.
                    self._highest = scan.highest(self._question)
            for key in keys:
                self._join(Turn(key))
            return

    def _join(self, turn: Turn) -> None:
        self._turns[turn.key.value] = turn
        self._line.append(turn)

    def _has_candidates(self, turn: Turn) -> bool:
        """Return whether the key has rows to try; if it has none, it is over, busy or held."""
        if turn.is_old:
            turn.is_old = False
            turn.waiting.clear()
        if not turn.waiting and not self._read_rows(turn):
            return False
        if not turn.is_last and (found := self._suspects.among(turn.waiting)):
            # Race: poison row. The rows behind one that killed a process wait with it.
            turn.suspects.update(found)
            self._suspected.update(found)
            self._last.append(turn)
            return False
        return True

    def _read_rows(self, turn: Turn) -> bool:
        question, whole = self._question, self._groups.whole
        assert question is not None
        if turn.in_flight or (turn.left is not None and turn.left <= 0):
            return False
        most = None if whole else reads.ROWS + len(turn.tried) + len(turn.missed)
        found, is_full = reads.candidates(question, turn.key, most=most)
        if turn.left is None:
            # Race: endless run. Rows of a key that keep arriving must not keep the run going.
            turn.left = reads.count(question, turn.key) if is_full else len(found)
        if whole and not self._is_from_before(found):
            return False
        free = self._in_order(turn, found) if self._groups.in_order else found
        seen = turn.tried | turn.missed
        turn.waiting = deque(each.pk for each in free if each.pk not in seen)
        if not turn.waiting and any(each.pk in turn.missed for each in found):
            self._busy_later(turn)
        return bool(turn.waiting)

    def _in_order(self, turn: Turn, found: list[reads.Candidate]) -> list[reads.Candidate]:
        """Return the rows up to the first one that blocks those behind it."""
        seen = turn.tried | turn.missed
        for place, candidate in enumerate(found):
            blocks = not candidate.is_due or candidate.pk in seen
            if blocks:
                if place == 0 and candidate.pk not in turn.missed:
                    self._hold(turn)
                return found[:place]
        return found

    def _is_from_before(self, found: list[reads.Candidate]) -> bool:
        """Return whether a row of the key existed when the run began, as far as its key shows."""
        numbers = [each.pk for each in found if isinstance(each.pk, int)]
        if not isinstance(self._highest, int) or len(numbers) < len(found):
            return True
        return any(pk <= self._highest for pk in numbers)

    # --- one key

    def _visit_key(self, turn: Turn) -> None:
        """Dispatch the next batch of a key, and take the batches that have ended."""
        run, question = self._run, self._question
        assert question is not None
        size = min(self._room(turn), len(turn.waiting))
        if size <= 0:
            # Only the end of the batches in flight shows if the limit is met.
            self._line.appendleft(turn)
            self.take(run.dispatcher.ended(everything=True))
            return
        pks = [turn.waiting.popleft() for _ in range(size)]
        if self._groups.whole and pks[0] not in self._alone:
            # One call for a key and run: what is left of a capped one waits for the next run.
            turn.waiting.clear()
            turn.left = 0
        batch: Batch[Any] = Batch(run.context, question, Wanted(pks, key=turn.key))
        turn.in_flight += 1
        if turn.waiting and turn.in_flight < self._most_batches:
            self._line.append(turn)
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
        elif any(pk in self._alone for pk in turn.waiting):
            size = min(size, next(n for n, pk in enumerate(turn.waiting) if pk in self._alone))
        if run.starts.is_shared and not run.starts.has_slot():
            size = 0
        is_careful = run.processor._flip_needs_result and run.counters.is_to_be_careful
        if is_careful and not self._groups.whole:
            size = min(size, max(0, 1 - in_flight))
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
            turn = self._turn_of(batch)
            counted = super().take([batch], waiting if turn is None else turn.waiting)
            got, missed = got + counted[0], missed + counted[1]
            if turn is not None:
                self._note_outcomes(turn, batch)
        return got, missed

    def _turn_of(self, batch: Batch[Any]) -> Turn | None:
        key = batch.wanted.key
        return None if key is None else self._turns.get(key.value)

    def _note_outcomes(self, turn: Turn, batch: Batch[Any]) -> None:
        stay = self._run.processor.repeats
        not_handled = [pk for pk, each in batch.outcomes.items() if not isinstance(each, Handled)]
        turn.tried.update(batch.outcomes if stay else not_handled)
        # In order, whether the next row may be tried depends on what became of this one.
        turn.is_old = turn.is_old or (self._groups.in_order and bool(not_handled))

    def _count_claim(self, batch: Batch[Any], waiting: deque[Any] | None) -> tuple[int, int]:
        """Count the rows that a claim missed, and put its key back in line if it is free."""
        turn = self._turn_of(batch)
        if turn is None:
            return super()._count_claim(batch, waiting)
        batch.is_counted = True
        known = batch.rows.keys() | batch.misses.keys() | batch.outcomes.keys()
        self._give_back([pk for pk in batch.wanted.pks if pk not in known], turn.waiting)
        turn.in_flight -= 1
        turn.left = (turn.left or 0) - len(batch.rows)
        missed = set(batch.misses.values())
        if Miss.KEY_IN_USE in missed:
            self._hold(turn)
        elif missed & {Miss.KEY_LOCKED, Miss.NOT_FIRST}:
            self._busy_later(turn)
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

    def _rejoin(self, turn: Turn, batch: Batch[Any]) -> None:
        """Put a key back in line; of one that is handled as a whole, rows may be locked."""
        if self._groups.whole and batch.misses:
            if not batch.rows:
                self._busy_later(turn)
                return
            self._hold(turn)  # the handler was called for the others
        if turn not in self._line:
            self._join(turn)

    def _busy_later(self, turn: Turn) -> None:
        """Visit a key again when the others had their turns."""
        if self._groups.whole:
            turn.left = None
        room = len(self._busy) < MOST_LOCKED
        self._leave_line(turn, self._busy if room else self._held)

    def _hold(self, turn: Turn) -> None:
        """Leave a key to the next run."""
        self._leave_line(turn, self._held)

    def _leave_line(self, turn: Turn, where: dict[Any, Turn]) -> None:
        if turn in self._line:
            self._line.remove(turn)
        if not turn.in_flight:
            self._turns.pop(turn.key.value, None)
        if len(where) < MOST_LOCKED:
            where[turn.key.value] = turn
