"""How long a copy goes on with a window in which it misses rows."""

from __future__ import annotations

#: Claims in vain before a copy looks for other candidates; twice as many each further time.
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
        self._most = FIRST_PATIENCE
        self._in_vain = 0
        self._is_old = False

    def begin(self, *, alone: bool) -> None:
        """Begin a window; a copy that took itself to be alone learns by its first miss."""
        self._in_vain = 0
        self._is_old = alone

    def ends(self, got: bool, missed: bool) -> bool:
        """Be told what became of a claim; tell whether to read a new window."""
        if got:
            self._is_old, self._most = True, FIRST_PATIENCE
        elif missed:
            self._in_vain += 1
        if not missed or self._endless:
            return False
        if self._is_old:
            return True
        if self._in_vain < self._most:
            return False
        self._most *= 2
        return True
