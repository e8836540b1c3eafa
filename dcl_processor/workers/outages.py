"""Says what is wrong once, and once that it is over, however often it is tried in between."""

from __future__ import annotations

import time
from collections.abc import Hashable

from .spawned import Trouble


class Outages:
    """Who is in trouble, why, and since when."""

    def __init__(self) -> None:
        self._open: dict[Hashable, tuple[str, float]] = {}

    def is_news(self, who: Hashable, trouble: Trouble) -> bool:
        """Note the trouble; return whether nobody has told of one like it that still lasts."""
        # A server that is gone, and one that is coming back, are lacking in the same way.
        lacking, _, _ = trouble.sentence.partition(", got")
        known = any(lacking == other for other, _ in self._open.values())
        before, since = self._open.get(who, ("", time.monotonic()))
        self._open[who] = lacking, since if before == lacking else time.monotonic()
        return not known

    def end(self, who: Hashable) -> float | None:
        """Note that there is none any more.

        Returns how many seconds it has lasted, if this is the last that lacked the same.
        """
        lacking, since = self._open.pop(who, ("", 0.0))
        last = lacking != "" and all(lacking != other for other, _ in self._open.values())
        return time.monotonic() - since if last else None
