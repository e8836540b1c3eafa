"""An effect that no database can take back: a line at the end of a file."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path


def effect(pk: int) -> None:
    """Add a line to the file in the variable AUDIT."""
    # One short line in append mode is written whole, whoever else writes.
    with Path(os.environ["AUDIT"]).open("a") as file:
        file.write(f"{pk}\n")


def effects() -> Counter[int]:
    """Count them by row."""
    return Counter(map(int, Path(os.environ["AUDIT"]).read_text().split()))
