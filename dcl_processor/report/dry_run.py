"""What a run would do: a value, as the report is one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dcl_processor.report.errors import printable
from dcl_processor.report.report import plain

#: The most rows that are counted for people: to count a forgotten table's backlog takes minutes.
MOST_COUNTED = 10_000


@dataclass(frozen=True, slots=True)
class DryRun:
    """What a run would do.

    ``pending``: pending rows; ``due``: those of them that a run may try now. Both are counted up to
    10,000, and 10,001 means that there are more. ``limit``: that of the run. ``first``: the primary
    keys of the first 5 rows that the run would try, in its order. ``rehearsed``: the row on which
    the flip was tried and rolled back; ``None``: no row was free, or the flip is not known before
    the handler has returned. ``refused``: why the flip of that row was refused; a handler may
    change that.
    """

    name: str
    pending: int = 0
    due: int = 0
    limit: int | None = None
    first: Sequence[Any] = ()
    rehearsed: Any = None
    refused: str = ""

    @property
    def rows(self) -> int:
        """The number of rows that the run would try; 10,001 means that there are more."""
        return self.due if self.limit is None else min(self.due, self.limit)

    def as_dict(self) -> dict[str, Any]:
        """Return the dry run as plain values that ``json.dumps()`` accepts.

        Counts end at 10,000; ``capped`` is true if there are more pending rows.
        """
        numbers = {name: getattr(self, name) for name in ("pending", "due", "rows")}
        return {
            "name": self.name,
            "dry_run": True,
            **{name: min(number, MOST_COUNTED) for name, number in numbers.items()},
            "capped": self.pending > MOST_COUNTED,
            "limit": self.limit,
            "first": [plain(pk) for pk in self.first],
            "rehearsed": plain(self.rehearsed),
            "refused": self.refused,
        }

    def __str__(self) -> str:
        """Return the dry run in one line."""
        if not self.pending:
            return f"{self.name}: dry run: nothing pending"
        rows = f"{counted(self.rows)} of {counted(self.pending)} pending rows"
        first = f", first {', '.join(printable(str(pk)) for pk in self.first)}" * bool(self.first)
        flip = self.refused.removeprefix(f"{self.name}: ") or "no flip was tried"
        if self.rehearsed is not None:
            flip = f"the flip takes row {printable(str(self.rehearsed))} out of pending"
        return f"{self.name}: dry run: would try {rows}{first}; {flip}"


def counted(number: int) -> str:
    """Write a number of rows that was counted up to ``MOST_COUNTED``."""
    return f"{MOST_COUNTED}+" if number > MOST_COUNTED else str(number)
