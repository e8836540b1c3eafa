"""One example: a world with rows, a question, flips, and how two workers are to meet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from django.db.models import QuerySet
from hypothesis import strategies as st

from dcl_processor import Delivery, Lease
from tests.fuzz.flips import claim, flip, possible
from tests.fuzz.questions import question
from tests.fuzz.words import meaning
from tests.fuzz.worlds import WORLDS, World

#: How two workers meet: side by side from a barrier on, or one wholly between the other's read and
#: its claim, or a stranger there who changes what is beside the rows.
RACE, BETWEEN, STRANGER = "race", "between", "stranger"

#: The column in which leases and claims keep their time; no question asks for it.
CLOCK = "leased_until"


@dataclass(frozen=True)
class Case:
    #: Where the question begins, which names its world.
    source: str
    #: The texts of ``pending`` and ``done``.
    question: str
    flip: str
    #: The column that is asked for and its value; most rows have it.
    column: str
    value: str
    #: One number per row, from which its other values come.
    seeds: Sequence[int]
    delivery: Delivery
    #: The text of ``claim``, if there is one, and whether a column keeps its time.
    claim: str | None
    timed: bool
    meeting: str
    #: Which of the lock statements the meeting is at.
    at: int
    options: Mapping[str, Any]

    @property
    def world(self) -> World:
        return next(world for world in WORLDS if world.source == self.source)

    def queryset(self) -> Any:
        return meaning(self.question)

    def done(self) -> Any:
        return meaning(self.flip)

    def delivered(self) -> dict[str, Any]:
        """Return the options of the delivery."""
        options: dict[str, Any] = {"delivery": self.delivery}
        if self.delivery == Delivery.AT_LEAST_ONCE:
            options["lease"] = Lease(600)
        if self.claim is not None:
            options["claim"] = meaning(self.claim)
            options["claimed_at"] = CLOCK if self.timed else None
        return options

    def mark(self) -> dict[str, Any] | None:
        """Return what is written to a row before its handler is called; ``None``: nothing is."""
        if self.delivery != Delivery.AT_MOST_ONCE:
            return None
        mark: dict[str, Any] = self.done() if self.claim is None else meaning(self.claim)
        return mark

    def make_rows(self) -> None:
        wanted = {self.column: meaning(self.value)}
        for number, seed in enumerate(self.seeds):
            self.world.make(number, seed, wanted if seed % 4 else {})

    @property
    def spare(self) -> str | None:
        """A text column that neither asks nor is written: the handler may write it itself."""
        for name in ("note", "plate"):
            asked = f"{self.question} {self.flip} {self.claim}"
            if name in self.world.own and name not in asked and name != self.column:
                return name
        return None

    def rows(self, using: str = "default") -> QuerySet[Any]:
        """Return all rows of the table, those that a manager hides included."""
        return QuerySet(self.world.model, using=using)


@st.composite
def cases(draw: st.DrawFn, delivery: Delivery) -> Case:
    world = draw(st.sampled_from(WORLDS))
    column = draw(st.sampled_from([*world.own, *[next(iter(world.own))] * 3]))
    value = draw(st.sampled_from(possible(world.own[column])))
    done = draw(flip(world, column, value))
    marks = claim(world, column, value, done) if delivery == Delivery.AT_MOST_ONCE else None
    marks = draw(st.sampled_from((marks, marks, None)))
    # A parent's part is locked by a statement of its own, when the row itself is locked already.
    places = (0,) if world.model._meta.parents else (0, 0, 1)
    return Case(
        world.source,
        draw(question(world, column, value)),
        done,
        column,
        value,
        draw(st.lists(st.integers(0, 999), min_size=1, max_size=6)),
        delivery,
        None if marks is None else draw(marks),
        draw(st.booleans()),
        draw(st.sampled_from((RACE, BETWEEN, BETWEEN, STRANGER))),
        draw(st.sampled_from(places)),
        draw(st.sampled_from(({}, {}, {}, {"batch_size": 3}, {"batch_size": 2}))),
    )
