"""``python -m dcl_processor.alive FILE``: a probe of the file that ``--health-file`` writes.

It does not import Django, which takes seconds of processor time that a probe would cost each time.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

from dcl_processor import steady as time

#: Seconds.
MAX_AGE = 60.0


def main(arguments: list[str] | None = None) -> int:
    """Print one line; return 0 if the file is fresh, and 1 if it is old or missing."""
    parser = argparse.ArgumentParser(
        prog="python -m dcl_processor.alive",
        description="Tell whether the workers that write a health file are alive.",
    )
    parser.add_argument("file", type=Path, help="What --health-file of the command names.")
    parser.add_argument(
        "--max-age",
        type=_seconds,
        default=MAX_AGE,
        metavar="SECONDS",
        help=f"The age from which on the workers count as dead (default: {MAX_AGE:g}).",
    )
    options = parser.parse_args(arguments)
    try:
        age = time.time() - options.file.stat().st_mtime
    except OSError as error:
        print(f"not alive: {options.file}: {error.strerror}")
        return 1
    # A file from the future is left from before the clock was set.
    is_fresh = abs(age) <= options.max_age
    verdict = "alive" if is_fresh else "not alive"
    most = "" if is_fresh else f", expected at most {options.max_age:g} s"
    line = f"{verdict}: written {age:.1f} s ago{most}{_workers(options.file)}"
    # Whatever a row's key contains, the verdict is the exit code.
    print(line.encode("ascii", "backslashreplace").decode())
    return 0 if is_fresh else 1


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number of seconds above 0, got {text!r}")
    return seconds


def _workers(file: Path) -> str:
    """Return what the workers were at when the file was written."""
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        words = "".join(f"; {_worker(each)}" for each in document["workers"])
        return f" by process {document['pid']}{words}"
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return "; its content cannot be read"


def _worker(worker: dict[str, Any]) -> str:
    who = f"worker {worker['worker']} (process {worker['pid']}) {worker['state']}"
    if "rows" not in worker:
        return who
    more = worker["row_count"] - len(worker["rows"])
    rows = f"row{'s' * (worker['row_count'] > 1)} {', '.join(worker['rows'])}"
    rows += f" and {more} more" if more else ""
    call = worker.get("call", "")
    at = " for ".join(filter(None, [call, rows if worker["row_count"] else ""]))
    return f"{who} at {worker['processor']}, {at} since {worker['since']}"


if __name__ == "__main__":
    sys.exit(main())
