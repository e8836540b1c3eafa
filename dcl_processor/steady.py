"""The clock by which waits, limits and leases are measured; modules import it as ``time``.

Libraries that stop the time for a test replace ``time.monotonic()`` in all modules, and a wait that
was measured by it would never end. They leave this name of the same clock alone.
"""

from __future__ import annotations

import random
import time as _time
from functools import partial

__all__ = ["backoff", "monotonic", "sleep", "time"]

#: Seconds since some moment, which never go back; all processes of a machine share the clock.
monotonic = partial(_time.clock_gettime, _time.CLOCK_MONOTONIC)

#: Seconds since 1970, which a test may have stopped.
time = _time.time

sleep = _time.sleep

#: Seconds.
LONGEST_BACKOFF = 60.0


def backoff(failures: int) -> float:
    """Return the seconds until a further try after this many failures of what could not start.

    They are doubled after each failure, up to ``LONGEST_BACKOFF``; half of them is random.
    """
    longest: float = min(2.0 ** min(failures - 1, 16), LONGEST_BACKOFF)
    return longest * random.uniform(0.5, 1)  # noqa: S311  # no secret
