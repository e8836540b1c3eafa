"""Stops all processes of a command now and then, as a machine does that stands still.

python -m tests.stalls [--times 3] [--seconds 20] [--every 180] -- make test

Its servers, and what has left its parent, are recognised by a variable of their environment.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from contextlib import suppress

import psutil

TAG = "STALLED_BY"
GONE = (psutil.NoSuchProcess, psutil.AccessDenied)


def processes(known: set[psutil.Process]) -> set[psutil.Process]:
    """Return those that belong to the command, and are not known yet."""
    found, own = set[psutil.Process](), str(os.getpid())
    for process in psutil.process_iter():
        with suppress(*GONE):
            parent = process.parent()
            if process.environ().get(TAG) == own or parent in known or parent in found:
                found.add(process)
    return found - known


def stop_for(seconds: float) -> int:
    """Stop all, each one first that might start others, and let them go on; return how many."""
    stopped = set[psutil.Process]()
    while more := processes(stopped):
        for process in more:
            with suppress(*GONE):
                process.suspend()
        stopped |= more
    time.sleep(seconds)
    for process in stopped:
        with suppress(*GONE):
            process.resume()
    return len(stopped)


def main() -> int:
    """Return the command's exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--every", type=float, default=180, help="seconds, at random around it")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    with subprocess.Popen(options.command, env={**os.environ, TAG: str(os.getpid())}) as command:
        for number in range(1, options.times + 1):
            with suppress(subprocess.TimeoutExpired):
                command.wait(options.every * random.uniform(0.3, 1.7))  # noqa: S311  # no secret
                break
            print(f"Stopped {stop_for(options.seconds)} processes, time {number}", flush=True)
        return command.wait()


if __name__ == "__main__":
    sys.exit(main())
