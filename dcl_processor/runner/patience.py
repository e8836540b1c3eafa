"""How long a copy goes on with a window in which it misses rows."""

from __future__ import annotations

#: Rows missed in a row before a copy looks for other candidates; twice as many each further time.
FIRST_PATIENCE = 8


class Patience:
    """Decides when a copy among others reads a new window.

    A miss in a window of which something was got says that the window has grown old. Where nothing
    was got yet, somebody may hold the rows in bulk, and they stay held, whatever is read anew; or
    others have been through all of them while this copy slept. So it looks again after some misses
    in a row, and then less and less often.

    ``endless``: it never does.
    """

    def __init__(self, *, endless: bool) -> None:
        self._endless = endless
        self._met_another = False
        self._most = FIRST_PATIENCE
        self._in_vain = 0
        self._is_old = False

    def begin(self, *, alone: bool) -> None:
        """Begin a window; a copy that took itself to be alone learns by its first miss."""
        self._in_vain = 0
        self._is_old = alone

    def wants_choice(self, *, own_table: bool) -> bool:
        """Tell whether the next claim is to choose among the rows that come next.

        A lone copy never does. Where the lock asks nothing, a choice costs the server a look at all
        of them: that is worth it only where the rows seem to be held, and will be met in any case.
        """
        if own_table or self._endless:
            return self._met_another
        return self._in_vain > 0

    def ends(self, got: int, missed: int) -> bool:
        """Be told how many rows a claim got and missed; tell whether to read a new window."""
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
