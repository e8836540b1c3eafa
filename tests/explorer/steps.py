"""The steps that an actor takes, and which of them commute.

A schedule is an order of steps. Two schedules that differ only in the order of neighbouring steps
that commute are one and the same for the database and for the processors, and one of the two is
enough. Steps of two actors commute unless they touch the same thing and one of them changes it:

* *data* of a row: what is committed. Snapshots look at it, and so does the second look that
  PostgreSQL takes at a row whose lock it got; a commit changes it.
* *lock* of a row: taking it and letting it go change it. Plain reads do not look at it.
* *handler* of a row: two handlers of one row do not commute, though they touch nothing, since
  what is asked about them is their order.
* *time*: looked at by whatever compares a lease with the clock; changed by its passing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from tests.crash.trace import integers

LOCKS = " FOR NO KEY UPDATE"
_BOOKKEEPING = ("BEGIN", "SAVEPOINT", "RELEASE", "ROLLBACK TO", "SHOW", "SET ")

Thing = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Step:
    """What an actor is about to do, to which rows.

    ``is_shared``: another actor could tell whether it comes before or after its own steps.
    ``gate``: the step that follows inside the same statement, after its snapshot and before its
    lock. ``choices``: it is no step but a die, and has so many sides.
    """

    name: str
    rows: frozenset[int] = frozenset()
    reads: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset()
    is_shared: bool = True
    gate: Step | None = None
    choices: int = 0
    #: Whether the database may let it wait for a lock.
    may_wait: bool = False

    def __str__(self) -> str:
        return f"{self.name} {','.join(str(row % 10) for row in sorted(self.rows))}".strip()

    def commutes_with(self, other: Step) -> bool:
        """Tell whether it makes no difference which of the two comes first."""
        ours, theirs = self._things(self.writes), other._things(other.writes)
        return not (
            ours & (theirs | other._things(other.reads)) or theirs & self._things(self.reads)
        )

    def _things(self, kinds: Iterable[str]) -> set[Thing]:
        rows = {kind: {0} if kind == "time" else self.rows for kind in kinds}
        return {(kind, row) for kind in kinds for row in rows[kind]}


def kinds(words: str) -> frozenset[str]:
    return frozenset(words.split())


READ = Step("read", reads=kinds("data time"))
# What a snapshot says is decided before the statement's lock is asked for.
SNAPSHOT = Step("snapshot", reads=kinds("data time"))
# The second look at the newest version of a row is a part of getting its lock.
LOCK = Step("lock", reads=kinds("data"), writes=kinds("lock"))
# A statement outside a transaction commits what it writes, and lets go.
TAKE = Step("lock, write, commit", reads=kinds("data"), writes=kinds("data lock"))
WRITE = Step("write", reads=kinds("data"), writes=kinds("lock"))
COMMIT = Step("COMMIT", writes=kinds("data lock"))
ROLLBACK = Step("ROLLBACK", writes=kinds("lock"))
HANDLER = Step("handler", reads=kinds("data"), writes=kinds("handler"))
LOCAL = Step("local", is_shared=False)
#: Behind it there are no steps of that copy, so that it commutes with none of them.
DEATH = Step("copy A dies", writes=kinds("data lock handler"))
#: Taken as if every key were one; another one gets it, or not, and never waits.
KEY_LOCK = Step("key lock", writes=kinds("lock"))
#: The function that takes it.
KEY_LOCKS = "pg_try_advisory_xact_lock"
CLOCK = "STATEMENT_TIMESTAMP"


def describe(
    sql: str,
    params: Any,
    *,
    rows: frozenset[int],
    locked: set[Thing],
    transaction: bool,
    savepoint: bool,
) -> Step:
    """Return the step that a statement is; ``locked``: rows of tables this transaction locks.

    Not shared, so that no other actor could tell when it happens, are savepoints and questions
    about the session, and whatever asks or writes only rows whose lock this transaction has: a
    row lock keeps others from changing what is read, and no session sees a write before its COMMIT.
    """
    named = rows & set(integers(params)) or rows
    words = sql.lstrip()
    if KEY_LOCKS in sql:
        assert not _tables(sql), sql  # rows that it looked at would be as old as its snapshot
        return replace(KEY_LOCK, rows=rows)
    touched = {(table, row) for table in _tables(sql) for row in named}
    is_ours = transaction and touched <= locked and CLOCK not in sql
    if LOCKS in sql and not (is_ours and is_alone(sql)):
        return _at(SNAPSHOT, named, LOCK if transaction else TAKE)
    if words.startswith(_BOOKKEEPING):
        return replace(LOCAL, name=" ".join(words.split()[:1]))
    if savepoint or (is_ours and is_alone(sql)):
        return replace(LOCAL, name=words.split()[0], rows=named)
    if words.startswith("UPDATE"):
        # Of a handler, or of the editor: what the package writes waits for no other session.
        return _at(SNAPSHOT, named, replace(LOCK if transaction else TAKE, may_wait=True))
    return replace(READ, rows=named)


def is_alone(sql: str) -> bool:
    """Return whether a statement reads its table once, and so no other rows than it names."""
    return len(re.findall(r'(?:FROM|JOIN) "', sql)) < 2


def _at(step: Step, rows: frozenset[int], gate: Step) -> Step:
    return replace(step, rows=rows, gate=replace(gate, rows=rows))


def lockable(sql: str, rows: Iterable[int]) -> set[Thing]:
    """Return what a statement locks if it gets what it asks for."""
    # That of the outermost FROM; further ones are those of subqueries, which lock nothing.
    words = re.search(r'^UPDATE "(\w+)"|FROM "(\w+)"', sql)
    tables = {each for each in words.groups() if each} if words else _tables(sql)
    return {(table, row) for table in tables for row in rows}


def _tables(sql: str) -> set[str]:
    return set(re.findall(r'(?:FROM|JOIN|UPDATE) "(\w+)"', sql))


def with_gate(sql: str) -> str:
    """Put the gate into a statement that locks rows: the last condition to be looked at."""
    if LOCKS in sql:
        predicate, lock, way = sql.rpartition(LOCKS)
        predicate, order, by = predicate.partition(" ORDER BY")
        return f"{predicate} AND explorer_gate(){order}{by}{lock}{way}"
    assert re.search(r" WHERE .*[^;]$", sql, re.DOTALL), sql
    return f"{sql} AND explorer_gate()"
