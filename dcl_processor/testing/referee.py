"""Judges a race: which worker has which row, and the steps in which they got there."""

from __future__ import annotations

import re
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any


class Referee:
    """Judges handler calls; workers are numbered from 1.

    A handler that raised leaves its row to others: each worker may try a row that fails. A worker
    whose handler returned has the row until its outcome is known, and for good if it was processed.
    Before that, the same worker may call the handler again, to redo a batch whose transaction was
    lost.
    """

    def __init__(self, *, repeats: bool) -> None:
        self._repeats = repeats
        self._lock = threading.Lock()
        self._active: dict[Any, int] = {}
        self._processed: dict[Any, int] = {}
        self.handled: dict[Any, list[int]] = defaultdict(list)

    def starts(self, pk: Any, worker: int) -> str:
        """Note a handler call; return which worker has the row already, or an empty string."""
        with self._lock:
            self.handled[pk].append(worker)
            # Each run may handle rows that may rightly stay pending.
            if pk in self._processed and not self._repeats:
                return f"worker {self._processed[pk]}, which had finished it"
            if self._active.setdefault(pk, worker) != worker:
                return f"worker {self._active[pk]}, which had not finished it"
            return ""

    def raised(self, pk: Any, worker: int) -> None:
        """Note that the handler raised."""
        with self._lock:
            self._let_go(pk, worker)

    def settled(self, pk: Any, worker: int, outcome: str) -> None:
        """Note a row's outcome, as ``row_finished`` sends it."""
        with self._lock:
            self._let_go(pk, worker)
            if outcome == "processed":
                self._processed[pk] = worker

    def _let_go(self, pk: Any, worker: int) -> None:
        if self._active.get(pk) == worker:
            del self._active[pk]


# --- the steps of a race's workers, with one column per worker


#: Steps that are shown, the last ones, and characters of each.
LAST, WIDTH = 100, 34

_TABLE = re.compile(r'\b(?:FROM|UPDATE|INTO)\s+["`]?([\w.]+)', re.IGNORECASE)
LOCKS = re.compile(r" FOR (?:NO KEY )?UPDATE")


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
        head = self._line("step", [f"worker {n}" for n in range(1, self._workers + 1)])
        return "\n".join([head, *self._lines(steps[-LAST:])])

    def _lines(self, steps: Sequence[tuple[int, tuple[int, str]]]) -> Iterator[str]:
        for number, (worker, what) in steps:
            cells = [""] * self._workers
            cells[worker - 1] = what
            yield self._line(str(number), cells)

    def _line(self, number: str, cells: Sequence[str]) -> str:
        shown = (f"{cell:.{WIDTH}}".ljust(WIDTH) for cell in cells)
        return f"{number:>4}  {'  '.join(shown)}".rstrip()


def summary(sql: str, params: Any) -> str:
    """Return a statement in a few words: its verb, its table, its parameters."""
    verb = sql.split(None, 1)[0].upper()
    table = _TABLE.search(sql)
    if table is None:
        return sql
    lock = "lock " if LOCKS.search(sql) else ""
    return f"{lock}{verb} {table[1]} {_values(params)}".rstrip()


def _values(params: Any, most: int = 2) -> str:
    """Return the last parameters, which include the row's key."""
    if not params or not isinstance(params, list | tuple):
        return ""
    left_out = ["…"] if len(params) > most else []
    return f"({', '.join([*left_out, *map(str, params[-most:])])})"
