"""Records which worker has which row, and detects a row that is handled twice."""

from __future__ import annotations

import threading
from collections import defaultdict
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
