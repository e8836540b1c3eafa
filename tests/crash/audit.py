"""An effect that no database can take back: a line at the end of a file."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path


def effect(pk: int) -> None:
    """Add a line to the file in the variable AUDIT."""
    # One short line in append mode is written whole, even if other processes write.
    with Path(os.environ["AUDIT"]).open("a") as file:
        file.write(f"{pk}\n")


def effects() -> Counter[int]:
    """Count them by row."""
    return Counter(effects_in_order())


def effects_in_order() -> list[int]:
    """Return the row of each, the earliest first."""
    return [*map(int, Path(os.environ["AUDIT"]).read_text().split())]
