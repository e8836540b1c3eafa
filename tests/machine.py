"""How fast this machine is, and how busy: waits are scaled by it, and a red run tells it."""

from __future__ import annotations

import os
import time
from pathlib import Path

#: Seconds that the loop takes on the idle machine for which the budgets are written down.
REFERENCE = 0.068
#: A machine that is slower than this by its neighbours cannot be tested on.
TOO_SLOW = 4.0
#: Seconds that a run waits for a quieter moment.
QUIET_WITHIN = 120.0


class TooSlowError(Exception):
    """The machine stayed too slow for as long as a run waits."""


def factor() -> float:
    """Return how many times longer than on the idle machine a fixed piece of work takes."""
    return min(_loop() for _ in range(5)) / REFERENCE


def wait_until_quiet() -> float:
    """Return the factor once it is small enough; raise ``TooSlowError`` if it stays too large."""
    end = time.monotonic() + QUIET_WITHIN
    while (found := factor()) > TOO_SLOW:
        if time.monotonic() > end:
            raise TooSlowError(
                f"MACHINE TOO SLOW: expected at most {TOO_SLOW:g} times the time of an idle one, "
                f"got {found:.1f} for {QUIET_WITHIN:g} s; run it again when less else is running."
            )
        time.sleep(1)
    return found


def described(began_with: float) -> str:
    """Describe the machine in one line; ``began_with``: its factor when the run began."""
    load = " ".join(f"{each:.1f}" for each in os.getloadavg())
    return (
        f"machine: {os.cpu_count()} processors, load {load}, {began_with:.1f} times as slow as the "
        f"idle one when it began, {factor():.1f} now; CPU pressure {_pressure()}, steal {_steal()}"
    )


def _loop() -> float:
    began, number = time.perf_counter(), 0
    for each in range(3_000_000):
        number += each & 7
    return time.perf_counter() - began


def _pressure() -> str:
    try:
        return Path("/proc/pressure/cpu").read_text().split("\n")[0].rpartition(" total")[0]
    except OSError:
        return "unknown"


def _steal() -> str:
    try:
        ticks = [int(each) for each in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    except OSError:
        return "unknown"
    return f"{100 * ticks[7] / sum(ticks):.1f} %"
