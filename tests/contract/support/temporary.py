"""Objects of the database that exist for one test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from django.db import connection


@contextmanager
def temporary(create: str, drop: str) -> Iterator[None]:
    """Create something for the time of the block."""
    with connection.cursor() as cursor:
        cursor.execute(create)
    try:
        yield
    finally:
        with connection.cursor() as cursor:
            cursor.execute(drop)
