"""How many rows are pending: a number for people, which may be out of date when it is read."""

from __future__ import annotations

from typing import Any

from .candidates import scan
from .candidates.question import ask
from .processor import BatchProcessor
from .report import MOST_COUNTED, counted
from .runner import limits

#: The most rows that are counted, and how such a number is written.
MOST, words = MOST_COUNTED, counted


def count(processor: BatchProcessor[Any], *, using: str | None = None, most: int = MOST) -> int:
    """Return the number of pending rows without a lock; ``most`` + 1 means that there are more."""
    limits.check_alias("using", using or processor.using)
    limits.check_alias("read_using", processor.read_using)
    question = ask(
        processor.pending,
        label=processor.name,
        using=using or processor.using,
        read_using=processor.read_using,
    )
    return scan.count(question, most)
