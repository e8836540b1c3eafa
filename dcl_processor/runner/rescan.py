"""When a worker that misses rows reads its candidates again."""

from __future__ import annotations

#: Consecutive misses before a worker reads other candidates; twice as many each further time.
MISSES_BEFORE_RESCAN = 8

#: Rows that a worker claims without a miss before it takes itself for alone again.
ALONE_AFTER = 100


class RescanPolicy:
    """Decides when a worker among others reads a new window.

    After a window gave rows, one miss means that it is stale, and a new one is read. If it gave
    none yet, another worker may hold its rows in bulk, and a new window would not change that. So a
    new one is read after 8 consecutive misses, then after 16, and so on.

    ``never``: it keeps to each window until its end.
    """

    def __init__(self, *, never: bool) -> None:
        self._never = never
        #: Rows claimed since the last miss; ``None``: no other worker was met.
        self._since_miss: int | None = None
        self._most = MISSES_BEFORE_RESCAN
        self._misses = 0
        self._is_old = False

    def begin_window(self, *, alone: bool) -> None:
        """Begin a window; a worker that seems to be alone ends it at the first miss."""
        self._misses = 0
        self._is_old = alone

    def should_choose(self, *, own_table: bool) -> bool:
        """Return whether the next claim is to choose among the rows that come next.

        A lone worker never does. If the locking statement does not check the question, because it
        spans tables, a choice makes the server check it for each of these rows. That is worth it
        only after a miss.
        """
        if own_table or self._never:
            return self._since_miss is not None
        return self._misses > 0

    def _note_company(self, got: int, missed: int) -> None:
        if missed:
            self._since_miss = 0
        elif self._since_miss is not None:
            self._since_miss += got
            if self._since_miss >= ALONE_AFTER:
                self._since_miss = None

    def should_rescan(self, got: int, missed: int, *, replaced: bool = False) -> bool:
        """Record how many rows a claim got and missed; return whether to read a new window.

        ``replaced``: it chose other rows instead of those that it missed.
        """
        self._note_company(got, missed)
        if replaced:
            missed = 0
        if got:
            self._is_old, self._misses, self._most = True, 0, MISSES_BEFORE_RESCAN
        else:
            self._misses += missed
        if not missed or self._never:
            return False
        if self._is_old:
            return True
        if self._misses < self._most:
            return False
        self._most *= 2
        return True
