"""The append-only audit: a line for whatever a handler does, which no kill takes back.

A line is one ``write()`` to a file opened for appending, so that lines of several processes do not
mix. Times are the monotonic clock's, which all processes of a machine share.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(slots=True)
class Call:
    """One call of a handler; ``ended`` is when it returned, if it did."""

    place: int
    pk: int
    pid: int
    route: str
    began: float
    ended: float | None = None
    raised: str = ""
    raised_at: float | None = None
    #: The session that its work in the database was done in, if it came to that.
    backend: int | None = None
    #: When its process began the row before.
    before: float = float("-inf")

    @property
    def over(self) -> float | None:
        """When the handler returned or raised; ``None``: its process died before."""
        return self.raised_at if self.ended is None else self.ended


#: Bytes of a line; a page's are a multiple of it.
LENGTH = 128


@cache
def _file() -> int:
    return os.open(os.environ["CHAOS_AUDIT"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def note(what: str, place: int, pk: int, value: object = "-") -> None:
    """Write a line; ``what``: "begin", "worked", "end" or "raised"."""
    route = os.environ["CHAOS_ROUTE"]
    line = f"{what} {place} {pk} {os.getpid()} {route} {time.monotonic()!r} {value}"
    # Of one length, so that no line lies in two pages of the file: who reads meanwhile could see
    # the half of such a line.
    os.write(_file(), f"{line:{LENGTH - 1}}\n".encode())


def read(path: Path) -> list[Call]:
    """Return the calls in the order in which they began."""
    calls: list[Call] = []
    latest: dict[tuple[int, int, int], Call] = {}
    last: dict[int, float] = {}
    for what, place, pk, pid, route, at, value in _lines(path):
        key = int(place), int(pk), int(pid)
        if what == "begin":
            latest[key] = Call(*key, route, float(at), before=last.get(key[2], float("-inf")))
            last[key[2]] = float(at)
            calls.append(latest[key])
        elif what == "worked":
            latest[key].backend = int(value)
        elif what == "end":
            latest[key].ended = float(at)
        else:
            latest[key].raised, latest[key].raised_at = value, float(at)
    return calls


def _lines(path: Path) -> Iterator[list[str]]:
    if path.exists():
        with path.open() as lines:
            yield from (line.split() for line in lines if line.endswith("\n"))
