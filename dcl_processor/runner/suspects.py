"""Rows that were in flight when their process died; a run handles them after all others."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Any

from dcl_processor import log_fields, worker
from dcl_processor import steady as time
from dcl_processor.execution.in_flight import Death, Notes

#: Logs what no report contains. The command shows it, however logging is configured.
logger = logging.getLogger("dcl_processor.operations")

#: Seconds between two looks at the notes, because other workers may die during this run.
LOOK_EVERY = 0.1


class Suspects:
    """The rows that one run is to handle last, and why.

    Those whose process was killed for them since the run began, or its command, are left to the
    next run: each further worker of this one would have to be killed, too.
    """

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self._since = worker.began or time.time()
        #: When the notes are to be read again, by the monotonic clock.
        self.look_at = 0.0
        self._aside: dict[str, Any] = {}
        # The candidates that were searched last, and for how many keys.
        self._looked_through: tuple[Collection[Any], int] = (), 0

    def among(self, waiting: Collection[Any]) -> list[Any]:
        """Return those of the candidates that the run is to handle last."""
        now = time.monotonic()
        if now >= self.look_at:
            self.look_at = now + LOOK_EVERY
            self._look()
        known = self._notes.known
        before, keys = self._looked_through
        if not known or (before is waiting and keys == len(known)):
            return []
        self._looked_through = waiting, len(known)
        # Race: poison row. A row that killed a process may kill this one: the others come first.
        found = {str(pk): pk for pk in waiting if str(pk) in known}
        self._aside.update(found)
        return list(found.values())

    def _look(self) -> None:
        deaths = self._notes.look()
        left = [each for each in deaths if each.is_for_rows and each.since >= self._since]
        self._tell([each for each in deaths if each not in left], "handled last, one by one")
        self._tell(left, "left to the next run")

    def _tell(self, deaths: Sequence[Death], what: str) -> None:
        if not deaths:
            return
        name, number = self._notes.label, sum(len(death.keys) for death in deaths)
        log_fields.log(
            logger,
            logging.ERROR,
            "%s: %s; if still pending, these rows are %s",
            name,
            "; ".join(map(str, deaths)),
            what,
            extra=log_fields.fields(name, row_count=number),
        )

    def in_turn(self) -> list[Any]:
        """Return the suspects; rows that were in flight in the fewest dead processes come first."""
        known = self._notes.known
        found = [key for key in self._aside if not self._is_left(key)]
        return [self._aside[key] for key in sorted(found, key=lambda key: known[key])]

    def left(self) -> list[Any]:
        """Return the suspects that are left to the next run."""
        return [pk for key, pk in self._aside.items() if self._is_left(key)]

    def _is_left(self, key: str) -> bool:
        return any(
            death.is_for_rows and death.since >= self._since and key in death.keys
            for death in self._notes.deaths.values()
        )

    def deaths_with(self, pks: Collection[Any]) -> int:
        """Return the highest number of processes that have died with one of these suspects."""
        return max(self._notes.known[str(pk)] for pk in pks)

    def settle(self, locked: Collection[Any]) -> None:
        """Forget finished rows; keep locked ones, which may kill the workers that hold them."""
        self._notes.drop({str(pk) for pk in locked}.isdisjoint)
