"""The breaker's part of a row of ``Control``; each function is one statement, or two.

Closed: ``open_until`` is empty. Open: it is in the future. Half-open: it is over, and one worker
may try one row, the probe.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any
from uuid import UUID

from django.db.models import F, Q

from dcl_processor.clock import DatabaseNow, Later
from dcl_processor.definition.retry import Breaker

from .tables import row_of

#: Seconds for which a success of another worker shows that not everything fails.
RECENT = 2.0

#: Seconds for which a worker that tries a row is trusted to be alive; renewed while it lives.
PROBE_FOR = 30.0

#: The columns of a breaker that is closed after a pause.
CLOSED: Mapping[str, Any] = {"failures": 0, "open_until": None, "probe": None, "probe_until": None}


def failed(name: str, breaker: Breaker, worker: UUID) -> None:
    """Count a failure; open the breaker if it is the last one of the row of failures.

    It stays closed if another worker has reported a success in the last seconds: then the rows fail
    here, and not everywhere.
    """
    row_of(name).update(failures=F("failures") + 1)
    succeeded_elsewhere = Q(succeeded_at__gt=_later(-RECENT)) & ~Q(succeeded_by=worker)
    enough = row_of(name).filter(failures__gte=breaker.failures, open_until=None)
    enough.filter(Q(succeeded_at=None) | ~succeeded_elsewhere).update(
        open_until=_later(breaker.seconds), probe=None, probe_until=None
    )


def succeeded(name: str, worker: UUID) -> None:
    """Take note of a success, which ends the row of failures."""
    row_of(name).filter(open_until=None).update(
        failures=0, succeeded_at=DatabaseNow(), succeeded_by=worker
    )


def take_probe(name: str, worker: UUID) -> bool:
    """Return whether this worker is the one that tries a row, now that the pause is over."""
    # Its own: the answer may have been lost.
    free = Q(probe=None) | Q(probe=worker) | Q(probe_until__lte=DatabaseNow())
    # Race: two probes. Of two workers that find it free, the second one waits for the row's lock,
    # and its statement then finds the first one's probe.
    half_open = row_of(name).filter(free, open_until__lte=DatabaseNow())
    return bool(half_open.update(probe=worker, probe_until=_later(PROBE_FOR)))


def renew_probe(name: str, worker: UUID) -> bool:
    """Stay the worker that tries a row; return whether it still is."""
    return bool(row_of(name).filter(probe=worker).update(probe_until=_later(PROBE_FOR)))


def release_probe(name: str, worker: UUID) -> None:
    """Let another worker try a row, because this one found none."""
    row_of(name).filter(probe=worker).update(probe=None, probe_until=None)


def probe_succeeded(name: str, run: UUID, worker: UUID) -> None:
    """Close the breaker."""
    row_of(name).filter(probe=run).update(**CLOSED, succeeded_at=DatabaseNow(), succeeded_by=worker)


def probe_failed(name: str, breaker: Breaker, worker: UUID) -> None:
    """Begin the pause again."""
    row_of(name).filter(probe=worker).update(
        failures=F("failures") + 1, open_until=_later(breaker.seconds), probe=None, probe_until=None
    )


def _later(seconds: float) -> Later:
    return Later(timedelta(seconds=seconds))
