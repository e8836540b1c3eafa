"""Rows that processes had at hand when they died, kept out of the way of all others."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from typing import Any

from .at_hand import Notes

#: What no report has room for. The command shows it, whatever is configured.
logger = logging.getLogger("dcl_processor.operations")

#: Seconds between two looks at the notes: other copies may die while this one is at work.
LOOK_EVERY = 0.1


class Suspects:
    """The rows of one run that are to be handled last, and why."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self._look_at = 0.0
        self._aside: dict[str, Any] = {}
        # The last candidates that were looked through, and for how many keys.
        self._looked_through: tuple[Collection[Any], int] = (), 0

    def among(self, waiting: Collection[Any]) -> list[Any]:
        """Return those of the candidates that are to wait for their turn."""
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + LOOK_EVERY
            self._look()
        known = self._notes.known
        before, keys = self._looked_through
        if not known or (before is waiting and keys == len(known)):
            return []
        self._looked_through = waiting, len(known)
        # Race: poison row. What killed a process may kill this one: the others come first.
        found = {str(pk): pk for pk in waiting if str(pk) in known}
        self._aside.update(found)
        return list(found.values())

    def _look(self) -> None:
        if deaths := self._notes.look():
            logger.error(
                "%s: %s; what is still pending of that is handled last, row by row",
                self._notes.label,
                "; ".join(map(str, deaths)),
            )

    def in_turn(self) -> list[Any]:
        """Return them: who was at hand of the fewest processes that died comes first."""
        known = self._notes.known
        return [self._aside[key] for key in sorted(self._aside, key=lambda key: known[key])]

    def settle(self, locked: Collection[Any]) -> None:
        """Forget what is over; rows that others have locked may be what they die of."""
        self._notes.settle({str(pk) for pk in locked})
