"""Count what a connection says to its server, as libpq itself traces it.

A *statement* is everything that is executed, but BEGIN and COMMIT; a message may have several. A
*round trip* is a turn: something was sent, and an answer was waited for; so what is pipelined
counts once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from django.db import connection
from psycopg import pq

_NOT_COUNTED = ("BEGIN", "COMMIT", "ROLLBACK")


@dataclass(slots=True)
class Talk:
    """What was said on one connection."""

    statements: list[str] = field(default_factory=list)
    transactions: int = 0
    round_trips: int = 0


@contextmanager
def listening(path: Path) -> Iterator[None]:
    """Trace Django's connection into a file until left."""
    connection.ensure_connection()
    driver = connection.connection.pgconn
    with path.open("wb") as file:
        driver.trace(file.fileno())
        driver.set_trace_flags(pq.Trace.SUPPRESS_TIMESTAMPS)
        try:
            yield
        finally:
            driver.untrace()


def read(path: Path) -> Talk:
    """Return what a trace says: for each message the side it came from, its length and its kind."""
    talk, prepared, bound, parsed = Talk(), dict[str, str](), "", ""
    asking = False
    for line in path.read_text(errors="replace").splitlines():
        side, _, rest = line.partition("\t")
        if side == "B":
            talk.round_trips += asking
            asking = False
            continue
        if side != "F":
            continue  # a statement's own line break
        asking = True
        _, kind, *rest_ = [part.strip() for part in rest.split("\t")]
        words = "\t".join(rest_)
        match kind:
            case "Query":
                _note(talk, *words.strip(' "').split("; "))
            case "Parse":
                name, _, parsed = words.lstrip('" ').partition('" "')
                prepared[name] = parsed
            case "Bind":
                bound = prepared.get(words.split('" "')[1].split('"')[0], parsed)
            case "Execute":
                _note(talk, bound)
    return talk


def _note(talk: Talk, *statements: str) -> None:
    for statement in statements:
        first = statement.split(" ", 1)[0].upper().rstrip(";")
        if first not in _NOT_COUNTED:
            talk.statements.append(statement)
        talk.transactions += first in {"COMMIT", "ROLLBACK"}
