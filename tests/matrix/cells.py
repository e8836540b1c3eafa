"""The cells of the matrix, and why some of them cannot exist."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from itertools import product

from django.db import connection

from dcl_processor import Delivery
from tests.shares import is_whole, selected_by

from .faults import ABOUT_THE_ROW, ANSWERS, ASKED, WRITES

T, MOST, LEAST = Delivery.TRANSACTIONAL, Delivery.AT_MOST_ONCE, Delivery.AT_LEAST_ONCE

STAGES = (*ASKED, *WRITES)

#: How rows are claimed and handled: by ten unless that is said.
WAYS = (
    "one by one",
    "ten at once",
    "watched",
    "two statements",
    "groups",
    "bulk",
    "async",
    "threads",
)

#: Rows of a cell, and the place of the row that is refused.
ROWS, PLACES = 7, (0, 4)

#: How often a fault that passes comes back; the rehearsal may meet it once.
TIMES = 2

#: Cells that a run of the gate tries.
SAMPLE = 160


@dataclass(frozen=True)
class Cell:
    """A row, refused at one kind of statement; ``retries``: whether the processor has a ``retry``.

    ``lasts``: it is refused for good, and otherwise ``TIMES`` times.
    """

    stage: str
    answer: str
    lasts: bool
    delivery: Delivery
    way: str
    place: int
    retries: bool

    def __str__(self) -> str:
        stage, answer, lasts, delivery, way, place, retries = astuple(self)
        ends = "for good" if lasts else f"{TIMES} times"
        retry = "retry" if retries else "no retry"
        return f"{stage}-{answer} {ends}-{delivery}-{way}-row {place}-{retry}"

    @property
    def is_about_the_row(self) -> bool:
        return self.answer in ABOUT_THE_ROW

    @property
    def in_transaction(self) -> bool:
        return self.delivery == T

    @property
    def has_claim(self) -> bool:
        """Whether a mark is written that ``reset`` takes off again."""
        return self.delivery == MOST or (self.delivery == LEAST and self.stage == "put-back")

    @property
    def is_unrecorded(self) -> bool:
        """Whether what becomes of the row is never recorded, because that is refused for good."""
        return self.lasts and self.is_about_the_row and self.fails

    @property
    def fails(self) -> bool:
        """Whether the handler raises for the row: what is written then is what is refused."""
        return self.stage in ("record", "dead letter", "put-back")


#: Which cells cannot exist, by the reason.
WHY_NOT: dict[str, Callable[[Cell], bool]] = {
    "a value that is refused is refused for good": lambda cell: (
        cell.is_about_the_row and not cell.lasts
    ),
    "what passes is tried again for as long as the lease lives": lambda cell: (
        cell.lasts and not cell.is_about_the_row and cell.stage not in ("claim", "mark")
    ),
    "constants of a kind that no row takes end a run before its first handler": lambda cell: (
        cell.answer == "data"
        and (cell.place == 0 or cell.way == "groups")
        and cell.stage not in (*ASKED, "record")
    ),
    "a lock that is never free holds up all rows of a claim": lambda cell: (
        cell.lasts and cell.answer in ("lock", "deadlock")
    ),
    "its rows have no mark": lambda cell: (
        cell.in_transaction and cell.stage in ("mark", "renewal", "put-back")
    ),
    "its handlers work in the transaction that has the lock": lambda cell: (
        cell.in_transaction and cell.way in ("async", "threads")
    ),
    "an error of one call would leave all its rows in doubt": lambda cell: (
        cell.delivery == MOST and cell.way == "bulk"
    ),
    "a heartbeat renews the leases of a run's handlers": lambda cell: (
        cell.stage == "renewal" and cell.delivery != LEAST
    ),
    "only a row that is tried again is put back": lambda cell: (
        cell.stage == "put-back" and not (cell.delivery == LEAST or cell.retries)
    ),
    "without a retry there is no column for it": lambda cell: (
        cell.stage == "record" and not cell.retries
    ),
    "a function in the question makes two statements of each claim": lambda cell: (
        cell.stage in ASKED and cell.way == "two statements"
    ),
    "MariaDB locks no keys": lambda cell: cell.way == "groups" and connection.vendor == "mysql",
    "the functions of SQLite raise no other error": lambda cell: (
        cell.stage in ASKED and cell.is_about_the_row and connection.vendor == "sqlite"
    ),
}


def why_not(cell: Cell) -> str | None:
    """Return why a cell cannot exist."""
    return next((reason for reason, applies in WHY_NOT.items() if applies(cell)), None)


def cells() -> Iterator[Cell]:
    every = product(STAGES, ANSWERS, (False, True), Delivery, WAYS, PLACES, (True, False))
    return (cell for parts in every if why_not(cell := Cell(*parts)) is None)


def chosen() -> list[Cell]:
    """Return the cells of this run: all of them, or as many as the gate has time for."""
    every = [*cells()]
    chance = random.Random(selected_by())  # noqa: S311  # no secret
    return every if is_whole() else chance.sample(every, SAMPLE)
