"""Nothing handled twice, nothing lost, nothing left: or the figure is worth nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from .handling import Call


class AuditError(Exception):
    """A contender did not do the work that it was timed for; the message says which rows."""


def audit(who: str, expected: Collection[int], calls: Sequence[Call], left: int) -> None:
    """Compare what should have been handled with the handler's log and with the table.

    ``left``: rows that the table still shows as pending. Raises ``AuditError``.
    """
    faults = [f"{left} rows still pending"] if left else []
    counts = Counter(call.pk for call in calls)
    faults += _named("handled more than once", [pk for pk, n in counts.items() if n > 1])
    faults += _named("never handled", set(expected) - set(counts))
    faults += _named("handled and not asked for", set(counts) - set(expected))
    if faults:
        raise AuditError(f"{who}: expected each row to be handled once, got {'; '.join(faults)}.")


def _named(fault: str, pks: Collection[int]) -> list[str]:
    some = ", ".join(map(str, sorted(pks)[:5]))
    return [f"{len(pks)} {fault} (such as {some})"] if pks else []
