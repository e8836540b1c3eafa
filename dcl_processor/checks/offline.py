"""Keeps the user's ``pending()`` from a database while a check looks at what it returns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Never

from django.db import connections

# Every other use of a connection calls one of these; Django's test cases bar the same methods.
_WAYS = ("connect", "temporary_connection", "cursor", "chunked_cursor")


class DatabaseAskedError(Exception):
    """A database would have been queried."""


@contextmanager
def offline() -> Iterator[None]:
    """Raise ``DatabaseAskedError`` wherever this thread would query a database."""
    barred = [(vars(connections[alias]), way) for alias in connections for way in _WAYS]
    before = [(attributes, way, attributes.get(way)) for attributes, way in barred]
    for attributes, way in barred:
        attributes[way] = _refuse
    try:
        yield
    finally:
        for attributes, way, own in before:
            if own is None:
                del attributes[way]
            else:
                attributes[way] = own


def _refuse(*_: Any, **__: Any) -> Never:
    raise DatabaseAskedError
