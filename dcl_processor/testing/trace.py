"""The steps of a race's workers, with one column per worker."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

#: Lines at the beginning, which show the opening, and at the end, which show the result.
FIRST, LAST = 40, 60
WIDTH = 34

_TABLE = re.compile(r'\b(?:FROM|UPDATE|INTO)\s+["`]?([\w.]+)', re.IGNORECASE)
_SAVEPOINT = re.compile(r'["`]s\d+_x(\d+)["`]')  # Django's names hold the thread's number
_LOCKS = re.compile(r" FOR (?:NO KEY )?UPDATE")


class Trace:
    """The steps in the order in which they were taken."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._steps: list[tuple[int, str]] = []
        self._lock = threading.Lock()
        self._complete = False

    def note(self, worker: int, what: str, *, last: bool = False) -> None:
        """Add a step of a worker, numbered from 1; steps after the last one are ignored."""
        with self._lock:
            if not self._complete:
                self._steps.append((worker, what))
            self._complete = self._complete or last

    def __str__(self) -> str:
        with self._lock:
            steps = list(zip(count(1), self._steps, strict=False))
        left_out = len(steps) - FIRST - LAST
        lines = [self._line("step", [f"worker {n}" for n in range(1, self._workers + 1)])]
        if left_out > 0:
            lines += self._lines(steps[:FIRST])
            lines += [f"  … {left_out} steps …", *self._lines(steps[-LAST:])]
        else:
            lines += self._lines(steps)
        return "\n".join(lines)

    def _lines(self, steps: Sequence[tuple[int, tuple[int, str]]]) -> Iterator[str]:
        for number, (worker, what) in steps:
            cells = [""] * self._workers
            cells[worker - 1] = what
            yield self._line(str(number), cells)

    def _line(self, number: str, cells: Sequence[str]) -> str:
        shown = (f"{cell:.{WIDTH}}".ljust(WIDTH) for cell in cells)
        return f"{number:>4}  {'  '.join(shown)}".rstrip()


def is_plain_read(sql: str) -> bool:
    """Return whether a statement reads, and locks nothing."""
    return sql.lstrip(" (").upper().startswith("SELECT") and not _LOCKS.search(sql)


def summary(sql: str, params: Any) -> str:
    """Return a statement in a few words: its verb, its table, its parameters."""
    verb = sql.split(None, 1)[0].upper()
    table = _TABLE.search(sql)
    if table is None:
        return _SAVEPOINT.sub(r"\1", sql)
    lock = "lock " if _LOCKS.search(sql) else ""
    return f"{lock}{verb} {table[1]} {_values(params)}".rstrip()


def _values(params: Any, most: int = 2) -> str:
    """Return the last parameters, which include the row's key."""
    if not params or not isinstance(params, list | tuple):
        return ""
    left_out = ["…"] if len(params) > most else []
    return f"({', '.join([*left_out, *map(str, params[-most:])])})"
