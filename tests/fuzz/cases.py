"""One example: a world with rows, a question, a flip, and how two copies are to meet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from django.db.models import QuerySet
from hypothesis import strategies as st

from tests.fuzz.flips import flip, possible
from tests.fuzz.questions import question
from tests.fuzz.words import meaning
from tests.fuzz.worlds import WORLDS, World

#: How two copies meet: side by side from a barrier on, or one wholly between the other's read and
#: its claim, or a stranger there who changes what is beside the rows.
RACE, BETWEEN, STRANGER = "race", "between", "stranger"


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
    meeting: str
    options: Mapping[str, Any]

    @property
    def world(self) -> World:
        return next(world for world in WORLDS if world.source == self.source)

    def queryset(self) -> Any:
        return meaning(self.question)

    def done(self) -> Any:
        return meaning(self.flip)

    def make_rows(self) -> None:
        wanted = {self.column: meaning(self.value)}
        for number, seed in enumerate(self.seeds):
            self.world.make(number, seed, wanted if seed % 4 else {})

    @property
    def spare(self) -> str | None:
        """A text column that neither asks nor is written: the handler may write it itself."""
        for name in ("note", "plate"):
            asked = f"{self.question} {self.flip}"
            if name in self.world.own and name not in asked and self.column != name:
                return name
        return None

    def rows(self, using: str = "default") -> QuerySet[Any]:
        """Return all rows of the table, those that a manager hides included."""
        return QuerySet(self.world.model, using=using)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    world = draw(st.sampled_from(WORLDS))
    column = draw(st.sampled_from([*world.own, *[next(iter(world.own))] * 3]))
    value = draw(st.sampled_from(possible(world.own[column])))
    return Case(
        world.source,
        draw(question(world, column, value)),
        draw(flip(world, column, value)),
        column,
        value,
        draw(st.lists(st.integers(0, 999), min_size=1, max_size=6)),
        draw(st.sampled_from((RACE, BETWEEN, BETWEEN, STRANGER))),
        draw(
            st.sampled_from(
                ({}, {}, {}, {"batch_size": 3}, {"strict_order": True}, {"batch_size": 2})
            )
        ),
    )
