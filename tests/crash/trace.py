"""The boundaries of a run, one after the other; at one of them the process may be killed."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from django.db import connections

from dcl_processor.sql.isolation import in_transaction

WRITES = re.compile(r"\s*(INSERT|UPDATE|DELETE|WITH dcl_)")
LOCKS = re.compile(r"FOR (NO KEY )?UPDATE|WHERE 1 = 0$")
#: How a settlement that does not wait for a locked row begins.
SETTLES = re.compile(r"^WITH dcl_mine .* SKIP LOCKED\) ", re.DOTALL)
WENT_ANOTHER_WAY = 3  # exit code of a victim whose run is not the one that was traced


@dataclass(frozen=True)
class Boundary:
    """A point between two steps.

    ``pks``: the rows that the step before it wrote or handled; ``commits``: that step made what
    it wrote last.
    """

    name: str
    pks: frozenset[int] = frozenset()
    commits: bool = False


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Trace:
    """Notes each boundary as the run comes to it; ``kill_at``: the number of the last one.

    ``end``: what ends there, this process unless said otherwise; ``using``: the run's alias.
    """

    def __init__(
        self,
        rows: frozenset[int],
        kill_at: tuple[int, str] | None = None,
        *,
        end: Callable[[], None] = die,
        using: str = "default",
    ) -> None:
        self.boundaries: list[Boundary] = []
        self._rows = rows
        self._kill_at = kill_at
        self._end = end
        self._connection: Any = connections[using]
        self._written: frozenset[int] = frozenset()
        self._locked: frozenset[int] = frozenset()

    def note(self, name: str, pks: frozenset[int] = frozenset(), *, commits: bool = False) -> None:
        number = len(self.boundaries)
        self.boundaries.append(Boundary(name, pks, commits))
        if self._kill_at is not None and self._kill_at[0] == number:
            if self._kill_at[1] != name:
                os._exit(WENT_ANOTHER_WAY)
            self._end()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch what this thread's connection does, commits and rollbacks included."""
        wrapper = self._connection
        commit, rollback = wrapper._commit, wrapper._rollback
        wrapper._commit, wrapper._rollback = self._ends(commit, "COMMIT"), self._ends(rollback)
        try:
            # Where a wrapper looks at each statement, they are sent one by one.
            with wrapper.execute_wrapper(self._statement):
                yield
        finally:
            wrapper._commit, wrapper._rollback = commit, rollback

    def _ends(self, end: Callable[[], None], name: str = "ROLLBACK") -> Callable[[], None]:
        def step() -> None:
            self.note(f"before {name}")
            end()
            pks, self._written = self._written, frozenset()
            self.note(f"after {name}", pks, commits=name == "COMMIT")

        return step

    def _statement(self, execute: Callable[..., Any], sql: str, params: Any, *rest: Any) -> Any:
        if sql in {"COMMIT", "ROLLBACK"}:
            # The server executes it in its own turn in a message.
            results: list[Any] = []
            self._ends(lambda: results.append(execute(sql, params, *rest)), sql)()
            return results[0]
        name = _name(sql)
        self.note(f"before {name}")
        result = execute(sql, params, *rest)
        pks: frozenset[int] = frozenset()
        named = self._rows & set(integers(params))
        if WRITES.match(SETTLES.sub("", sql)):
            # A claim of rows with keys marks those that the statement before it has locked.
            pks = named or self._locked
        elif name == "lock":
            self._locked = named
        # A message without a BEGIN is a transaction that Django does not know.
        inside = self._connection.in_atomic_block or bool(in_transaction(self._connection))
        if inside:
            self._written |= pks
        self.note(f"after {name}", pks, commits=bool(pks) and not inside)
        return result


def integers(params: Any) -> Iterator[int]:
    """Yield the numbers among the parameters of a statement."""
    for each in params or ():
        if isinstance(each, int):
            yield each
        elif isinstance(each, list | tuple):
            yield from integers(each)
        elif isinstance(each, str) and re.fullmatch(r"\{[\d,]+\}", each):
            yield from map(int, each[1:-1].split(","))  # a list of keys


def _name(sql: str) -> str:
    """Name a statement by what it does, without the names of savepoints."""
    sql = SETTLES.sub("", sql)
    if LOCKS.search(sql):
        return "lock"
    # A flip is in a statement that counts what it writes.
    sql = sql.removeprefix("WITH dcl_flipped (still) AS (")
    words = sql.replace('"', "").replace("`", "").split()
    return " ".join(words[: {"UPDATE": 2, "INSERT": 3, "ROLLBACK": 3}.get(words[0], 1)])


#: The trace of this process's run, if it is traced.
current: Trace | None = None


def note(name: str, pk: int) -> None:
    """Be at a boundary inside a handler."""
    if current is not None:
        current.note(name, frozenset([pk]))
