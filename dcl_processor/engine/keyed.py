"""The candidates of a run whose keys take turns, and the order in which they are met."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from random import randint
from typing import Any

from django.db.models import Q

from dcl_processor.engine.context import Context
from dcl_processor.engine.rows import Batch
from dcl_processor.engine.source import MOST_LOCKED
from dcl_processor.keys.turns import Turns
from dcl_processor.keys.window import Found, Reads
from dcl_processor.pending import scan
from dcl_processor.pending.question import Question
from dcl_processor.sql.steps import Claimed, Wanted


class KeyedSource:
    """Gives rows to a run, key by key, and takes note of what became of them.

    ``most``: how many rows of one key may be in flight; ``None``: any number. Rows of a worker that
    is gone, and those that were rolled back with others, are handled alone.
    """

    def __init__(self, host: Context, reads: Reads, most: int | None) -> None:
        self._host, self._reads = host, reads
        self._turns = Turns(self._read, most, reads.in_order)
        self._waits: Iterator[bool] = host.limits.waits()
        self.question: Question[Any] = host.ask()
        #: Upper end of the run: rows that arrive later are left to the next one.
        self._end: Q | None = None
        #: Rows that are handled alone, by their keys: those that failed with others; those of a
        #: worker that is gone; those that may kill their process, which come last.
        self._alone: deque[Any] = deque()
        self._leftover, self._last = dict[Any, Any](), dict[Any, Any]()
        self._only: Any = None
        self._keys = dict[Any, Any]()
        #: Rows that were missed, those of them that others had locked; keys of those locked here.
        self._absent, self._elsewhere = set[Any](), set[Any]()
        self._ours = dict[Any, Any]()
        self._locked: list[Any] = []
        host.counters.passes += 1

    # --- what the run takes

    def take(self, room: int) -> Batch | None:
        """Return the next rows to deliver, up to ``room``; ``None``: none now.

        None are left then, unless rows are in flight.
        """
        while room > 0 and self._only not in self._keys:
            if self._alone or self._turns.has_next() or (self._leftover and not self._keys):
                # A limit that is just met is no reason to say that more is left.
                return None if self._host.must_stop() else self._batch(room)
            if self._host.stopped or self._keys or not self._go_on():
                return None
        return None

    def _batch(self, room: int) -> Batch | None:
        room, counters = self._host.let_in(room, len(self._keys)), self._host.counters
        if room <= 0:
            return None
        if self._alone:
            if counters.refusals and not self._reads.in_order:
                # Race: poison row. Rows whose flip is refused would end each run before the others.
                self._alone.rotate(-secrets.randbelow(len(self._alone)))
            pk = self._alone.popleft()
            return self._wanted({pk: self._keys[pk]}, is_alone=True)
        if self._leftover and not self._keys:
            # Race: poison row. Such a row may have killed its worker, so nothing else is in flight
            # in this process when it is tried. It comes first, because it holds its key.
            self._only = next(iter(self._leftover))
            return self._wanted({self._only: self._leftover.pop(self._only)}, is_alone=True)
        return self._wanted(self._turns.take(1 if counters.refusals else room), is_alone=False)

    def _wanted(self, rows: dict[Any, Any], *, is_alone: bool) -> Batch:
        self._keys |= rows
        return Batch(self.question, Wanted([*rows], len(rows), rows), is_alone)

    def _go_on(self) -> bool:
        """Begin another cycle for what others had; then give the rows that come last."""
        self._look_at_absent()
        if not self._turns.is_over:
            return True
        if self._turns.has_busy and next(self._waits, False):
            self._host.counters.passes += 1
            self._locked.clear()
            self._turns.resume()
            return True
        last, self._last = self._last, {}
        for pk, key in last.items():
            self._alone.append(pk)
            self._keys[pk] = key
        if not last:
            self._host.notes.suspects.clear()  # those that are left are no longer pending
        return bool(last)

    # --- what became of them

    def note_claim(self, batch: Batch, claimed: Claimed) -> None:
        """Take note of rows that a claim did not get."""
        self._elsewhere.update(claimed.elsewhere)
        missed = [pk for pk in batch.wanted.pks if pk not in claimed.rows]
        self._ours |= {pk: batch.wanted.keys[pk] for pk in {*claimed.ours}.intersection(missed)}
        self._miss(missed)

    def missed(self, pks: Sequence[Any]) -> None:
        """Leave rows to another cycle that another session keeps from being claimed."""
        self._elsewhere.update(pks)
        self._miss(pks)

    def _miss(self, pks: Sequence[Any]) -> None:
        self._absent.update(pks)
        for pk in pks:
            self._turns.miss(pk, self._keys.pop(pk), is_alone=pk in self._elsewhere)

    def put_back(self, pks: Sequence[Any]) -> None:
        """Take rows back that were not tried."""
        for pk in pks:
            self._turns.put_back(pk, self._keys.pop(pk))

    def redo(self, pks: Sequence[Any]) -> None:
        """Take rows back that failed together: they are handled one by one."""
        self._alone.extend(pks)

    def end(self, pks: Sequence[Any], left: Collection[Any] = ()) -> None:
        """Take note that rows are over; ``left``: those that have to be taken for pending."""
        for pk in pks:
            self._turns.end(pk, self._keys.pop(pk), done=pk not in left)

    def finish(self) -> None:
        """Count the rows that others still have, and those that another row of their key holds."""
        self._look_at_absent()
        counts = self._host.counters.counts
        counts["skipped"] += len(self._locked)
        if self._end is not None and self._host.stopped is None:
            known = {*self._turns.tried, *self._locked}
            counts["held"] = scan.count(self._host.ask(), MOST_LOCKED, known)

    def _look_at_absent(self) -> None:
        """Tell the rows that others have from those that are done: one read, without a lock."""
        absent, self._absent = [*self._absent], set()
        if absent:
            there = scan.still_pending(self.question, absent)
            self._host.counters.counts["stale"] += len(absent) - len(there)
            locked = [pk for pk in there if pk in self._elsewhere]
            self._locked += locked[: MOST_LOCKED - len(self._locked)]
            # Race: key that is passed. The row was done since it was read, and no other worker
            # has its key: one that has missed it because of this claim may have ended.
            for pk in self._ours.keys() - {*there}:
                self._turns.go_on(self._ours[pk])
            self._elsewhere.clear()
            self._ours.clear()

    # --- the read

    def _read(self, after: Any, tried: Sequence[Any]) -> tuple[list[Found], Any]:
        """Read a window; put aside the rows that are not handled in their turn."""
        self.question = question = self._host.ask()
        found, last = self._look(question, after, tried)
        if found and self._end is None:
            # Race: endless run. Rows that arrive during the run get higher keys.
            top = scan.highest(question) or found[0].pk
            self._end = Q(pk__lte=top)
            if last is not None and isinstance(top, int):
                # Race: key that is passed. Runs that are cut short would all stop among the lowest
                # keys, so each also begins at the key of a random row.
                lowest = min(row.pk for row in found)
                somewhere = Q(pk__gte=randint(lowest, max(lowest, top)))  # noqa: S311  # no secret
                rows = question.table.filter(somewhere).order_by("pk")
                keys = rows.values_list(self._reads.column, flat=True)
                more, last = self._look(question, scan.retrying(keys.first, keys.db), tried)
                found += more
        self._host.begin_window(question)
        return self._in_turn(found), last

    def _look(
        self, question: Question[Any], after: Any, tried: Sequence[Any]
    ) -> tuple[list[Found], Any]:
        pending = question.unfiltered.filter(self._end or Q())
        read = partial(self._reads.read, pending, question.narrowed, after, tried)
        return scan.retrying(read, question.using)

    def _in_turn(self, found: Sequence[Found]) -> list[Found]:
        """Put aside the rows that are not handled in their turn; return the others."""
        suspects = self._host.notes.suspects
        turn, known = list[Found](), {*self._keys}
        for row in found:
            # A filter over a to-many relation gives a row once for each match.
            if row.pk in known:
                continue
            known.add(row.pk)
            if str(row.pk) in suspects:
                # Race: poison row. It would end each run before the others are tried. It holds its
                # key only where the order counts.
                self._last[row.pk] = row.key
                turn += [replace(row, is_due=False)] * self._reads.in_order
            elif row.is_leftover or row.pk in self._leftover:
                self._leftover[row.pk] = row.key
            else:
                turn.append(row)
        return turn
