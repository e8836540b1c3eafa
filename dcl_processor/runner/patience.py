"""How long a worker goes on with a window in which it misses rows."""

from __future__ import annotations

#: Consecutive misses before a worker reads other candidates; twice as many each further time.
FIRST_PATIENCE = 8


class Patience:
    """Decides when a worker among others reads a new window.

    After a window gave rows, one miss means that it is stale, and a new one is read. If it gave
    none yet, another worker may hold its rows in bulk, and a new window would not change that. So a
    new one is read after 8 consecutive misses, then after 16, and so on.

    ``endless``: it never does.
    """

    def __init__(self, *, endless: bool) -> None:
        self._endless = endless
        self._met_another = False
        self._most = FIRST_PATIENCE
        self._in_vain = 0
        self._is_old = False

    def begin(self, *, alone: bool) -> None:
        """Begin a window; a worker that seems to be alone ends it at the first miss."""
        self._in_vain = 0
        self._is_old = alone

    def wants_choice(self, *, own_table: bool) -> bool:
        """Return whether the next claim is to choose among the rows that come next.

        A lone worker never does. If the locking statement does not check the question, because it
        spans tables, a choice makes the server check it for each of these rows. That is worth it
        only after a miss.
        """
        if own_table or self._endless:
            return self._met_another
        return self._in_vain > 0

    def ends(self, got: int, missed: int) -> bool:
        """Record how many rows a claim got and missed; return whether to read a new window."""
        if got:
            self._is_old, self._in_vain, self._most = True, 0, FIRST_PATIENCE
        else:
            self._in_vain += missed
        self._met_another = self._met_another or missed > 0
        if not missed or self._endless:
            return False
        if self._is_old:
            return True
        if self._in_vain < self._most:
            return False
        self._most *= 2
        return True
