"""How fast rows leave a backlog, and when it is empty: a rate of the ledger, or of two looks."""

from __future__ import annotations

from typing import Any

from dcl_processor.insights.answer import Answer, How
from dcl_processor.pending import steady as time

#: Seconds between two looks that give a rate.
SHORTEST, LONGEST = 0.5, 600.0

#: The last look of this process at a processor on a database: when, and how many were pending.
_looks: dict[tuple[str, str | None], tuple[float, int]] = {}


def pace(
    name: str, using: str | None, pending: Answer[int], recorded: float | None
) -> tuple[Answer[float], Answer[float]]:
    """Return the rows a second, and the seconds until no row is pending; ``None``: none is.

    ``recorded``: the rate that the ledger has; without one, that of this process's last two looks.
    """
    if pending.value is None:
        return Answer.unknown(pending.why), Answer.unknown(pending.why)
    looked = _rate_of_looks(name, using, pending.value) if pending.how is How.EXACT else None
    rate = looked if recorded is None else recorded
    unrecorded = Answer[Any].not_recorded("it takes the ledger, or a second look, at fewer rows")
    found = unrecorded if rate is None else Answer(rate)
    if not pending.value:
        return found, Answer(None)
    if rate is None or rate <= 0:
        return found, unrecorded
    return found, Answer(round(pending.value / rate, 1), pending.how)


def _rate_of_looks(name: str, using: str | None, number: int) -> float | None:
    """Note a look; return by how many rows a second the backlog has shrunk since the one before."""
    now = time.monotonic()
    last, before = _looks.setdefault((name, using), (now, number))
    if now - last < SHORTEST:
        return None
    _looks[name, using] = now, number
    rate = max(0.0, before - number) / (now - last)
    return rate if now - last <= LONGEST else None
