"""``python -m dcl_processor.alive FILE``: a probe of the file that ``--health-file`` writes.

It does not import Django, which takes seconds of processor time that a probe would cost each time.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dcl_processor.pending import steady as time

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
        type=float,
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
    print(f"{verdict}: written {age:.1f} s ago{most}")
    return 0 if is_fresh else 1


if __name__ == "__main__":
    sys.exit(main())
