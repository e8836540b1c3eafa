"""What the three deliveries promise, written down once more in plain Python.

No database, no lock, no time: a row is a few flags, a transaction is a copy of them that is put
back. The histories of the property test are played on this and on the real thing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from dcl_processor import Delivery

#: Attempts before a row is given up on.
MOST = 2

#: What ends the process, and what is done about it.
DEATHS = ("die", "interrupt")

#: What happens beside a handler: a copy runs, takes the lapsed row over, or a person requeues it.
MEETINGS = ("copy", "late", "requeued")

Script = Mapping[int, str]


@dataclass
class Row:
    """``waiting``: snoozed, or failed a moment ago; ``leased``: by a lease that lives.

    ``worked``: a handler wrote to it, and that was kept.
    """

    done: bool = False
    dead: bool = False
    claimed: bool = False
    leased: bool = False
    waiting: bool = False
    attempts: int = 0
    worked: bool = False

    @property
    def may_be_tried(self) -> bool:
        return not (self.done or self.dead or self.claimed or self.leased or self.waiting)


@dataclass
class World:
    """The rows by their place, and which handler calls and outcomes a run has.

    ``beside``: what a copy's handler does, where one runs beside the run.
    """

    delivery: Delivery
    rows: dict[int, Row] = field(default_factory=dict)
    beside: Script = field(default_factory=dict)
    calls: list[int] = field(default_factory=list)
    report: Counter[str] = field(default_factory=Counter)

    def run(self, script: Script, size: int, besides: Collection[int] = ()) -> bool:
        """Run once over all rows but some; return whether the process lived."""
        waiting = [p for p, row in sorted(self.rows.items()) if row.may_be_tried]
        waiting = [place for place in waiting if place not in besides]
        while waiting:
            asked, waiting = waiting[:size], waiting[size:]
            batch = [place for place in asked if self.rows[place].may_be_tried]
            before = {place: replace(self.rows[place]) for place in batch}
            if not self._handle(batch, before, script):
                return False
        return True

    def requeue(self, places: Collection[int]) -> None:
        for place in places:
            self.rows[place] = Row(worked=self.rows.get(place, Row()).worked)

    def _handle(self, batch: list[int], before: Mapping[int, Row], script: Script) -> bool:
        for place in batch:
            self._mark(self.rows[place])
        refused = [place for place in batch if self.rows[place].attempts > MOST]
        started: set[int] = set()
        for place in batch:
            if place in refused:
                continue
            started.add(place)
            self.calls.append(place)
            self.rows[place].worked = True
            how = script.get(place, "ok")
            if how in DEATHS:
                self._end(how, batch, before, started, place)
                return False
            if how in MEETINGS:
                how = self._meet(place, how, batch)
            self._settle(place, how, before[place])
        for place in refused:
            # Counted by the claim, and no handler was called.
            self.rows[place].attempts = MOST
            self._settle(place, "fail", before[place])
        return True

    def _mark(self, row: Row) -> None:
        if self.delivery == Delivery.AT_MOST_ONCE:
            row.claimed = True
        if self.delivery == Delivery.AT_LEAST_ONCE:
            row.leased = True
            row.attempts += 1

    def _end(
        self,
        how: str,
        batch: list[int],
        before: Mapping[int, Row],
        started: Collection[int],
        at: int,
    ) -> None:
        """Leave behind what the crash table says."""
        if self.delivery == Delivery.TRANSACTIONAL:
            self.rows.update((place, replace(row)) for place, row in before.items())
            return
        if how == "die":
            return  # marked is what is marked
        for place in batch:
            settled = place in started and place != at
            if not settled and (self.delivery == Delivery.AT_LEAST_ONCE or place != at):
                self.rows[place] = replace(before[place], worked=self.rows[place].worked)

    def _meet(self, place: int, how: str, batch: list[int]) -> str:
        """Let another session act while the handler is at work; return what its own end is then."""
        if how == "requeued":
            self.requeue([place])
            return "lost"
        row = self.rows[place]
        row.leased = row.leased and how != "late"
        others = [each for each in batch if how == "copy" or each != place]
        copy = World(self.delivery, self.rows)
        copy.run(self.beside, 1, besides=others)
        self.calls += copy.calls
        return "lost" if how == "late" else "ok"

    def _settle(self, place: int, how: str, before: Row) -> None:
        row = self.rows[place]
        if how == "lost":
            self.report["lease_lost"] += 1
            return
        counted = self.delivery == Delivery.AT_LEAST_ONCE
        row.claimed = row.leased = False
        if how == "ok":
            row.done = True
            row.attempts = 0
            self.report["processed"] += 1
            return
        if self.delivery == Delivery.TRANSACTIONAL:
            row.worked = before.worked  # taken back to the row's savepoint
        if how == "snooze":
            row.attempts -= counted
            row.waiting = True
            self.report["snoozed"] += 1
            return
        row.attempts += not counted
        row.dead = how != "fail" or row.attempts >= MOST
        row.waiting = not row.dead
        self.report["discarded" if how == "discard" else "failed"] += 1
