"""How many rows are pending: a number for people, which may be out of date when it is read."""

from __future__ import annotations

from typing import Any

from .candidates.question import ask
from .processor import BatchProcessor
from .runner import limits

#: The most rows that are counted; to count the backlog of a forgotten table takes minutes.
MOST = 10_000


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
    keys = question.queryset.using(question.read_using).order_by().values("pk")
    if not question.own_table:
        # A filter over a to-many relation gives a row once per match.
        keys = keys.distinct()
    return keys[: most + 1].count()


def words(number: int) -> str:
    """Write a number of rows that was counted up to ``MOST``."""
    return f"{MOST}+" if number > MOST else str(number)
