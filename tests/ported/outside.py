"""What the loops talk to; tests put other functions in the place of these."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


def push(member: Any, texts: Sequence[str]) -> None:
    """Send texts to the open pages of a member, in one message."""
    raise ConnectionError


def perform(payload: str) -> None:
    """Do what a task or a job says."""
    raise ConnectionError


def mutate(prices: Sequence[tuple[str, int]]) -> list[str | None]:
    """Change prices in the shop; return for each ``None``, or why it was refused."""
    raise ConnectionError


def ask(payload: str) -> str:
    """Return the answer of another system."""
    raise ConnectionError


@contextmanager
def connect() -> Iterator[str]:
    """Open a connection to another system."""
    yield "connection"
