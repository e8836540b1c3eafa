"""One example: a world with rows, a question, flips, and how two copies are to meet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from django.db.models import QuerySet
from hypothesis import strategies as st

from dcl_processor import Delivery, Lease, Retry
from tests.fuzz.flips import claim, flip, possible
from tests.fuzz.questions import heart, link, question
from tests.fuzz.troubles import Touch, Trouble, troubles
from tests.fuzz.words import meaning, mostly
from tests.fuzz.worlds import WORKERS, WORLDS, World

#: How two copies meet: side by side from a barrier on, or one wholly between the other's read and
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
    #: What handlers do beside succeeding, and the texts of ``failed`` and ``reset``, if there are.
    trouble: Trouble | None = None
    failed: str | None = None
    reset: str | None = None

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
        return {**options, **self._troubled()}

    def _troubled(self) -> dict[str, Any]:
        if self.trouble is None:
            return {}
        return {
            "failed": None if self.failed is None else meaning(self.failed),
            "reset": None if self.reset is None else meaning(self.reset),
            "retry": Retry(2, backoff=0) if self.trouble.retry else None,
            # Rows that are claimed together may be settled together.
            **({"batch_size": 3} if self.trouble.is_async else {}),
        }

    def mark(self) -> dict[str, Any] | None:
        """Return what is written to a row before its handler is called; ``None``: nothing is."""
        if self.delivery != Delivery.AT_MOST_ONCE:
            return None
        mark: dict[str, Any] = self.done() if self.claim is None else meaning(self.claim)
        return mark

    def make_rows(self) -> None:
        wanted = {self.column: meaning(self.value)}
        if self.trouble is not None and self.world in WORKERS:
            wanted.update(claimed=False, dead=False)
        for number, seed in enumerate(self.seeds):
            self.world.make(number, seed, wanted if seed % 4 else {})

    @property
    def spare(self) -> str | None:
        """A text column that neither asks nor is written: the handler may write it itself."""
        if self.trouble is not None and self.trouble.touch == Touch.SAVE:
            return None  # which writes back what the instance says
        for name in ("note", "plate"):
            asked = f"{self.question} {self.flip} {self.claim}"
            if name in self.world.own and name not in asked and self.column != name:
                return name
        return None

    def rows(self, using: str = "default") -> QuerySet[Any]:
        """Return all rows of the table, those that a manager hides included."""
        return QuerySet(self.world.model, using=using)


def cases(delivery: Delivery) -> st.SearchStrategy[Case]:
    """Return examples; in every second one the handlers do more than succeed."""
    plain, working = plain_cases(delivery), working_cases(delivery)
    troubled = troubled_cases(plain, delivery)
    kinds = (plain, plain, plain, working, working, troubled)
    return st.sampled_from(range(len(kinds))).flatmap(lambda place: kinds[place])


@st.composite
def troubled_cases(draw: st.DrawFn, plain: st.SearchStrategy[Case], delivery: Delivery) -> Case:
    """Return examples over any model; what is given up on is flipped like what is done."""
    case = draw(plain)
    # A manager that hides rows hides them from save() and refresh_from_db(), too.
    touched = case.world.name != "Crate"
    trouble = draw(troubles(delivery, retry=False, touched=touched))
    failed = draw(st.sampled_from((case.flip, None)))
    met = _met(case, trouble)
    return replace(case, trouble=trouble, failed=failed, meeting=met, seeds=_few(case))


@st.composite
def working_cases(draw: st.DrawFn, delivery: Delivery) -> Case:
    """Return examples over the models that have every column that a delivery may write."""
    world = draw(st.sampled_from(WORKERS))
    case = draw(plain_cases(delivery))
    trouble = draw(troubles(delivery, retry=True, touched=True))
    waits = ".filter(claimed=False, dead=False)"
    asked = draw(heart(world, "done", "False")) + draw(mostly(st.just(""), link(world)))
    marks = delivery == Delivery.AT_MOST_ONCE and (trouble.retry or draw(st.booleans()))
    put_back = trouble.retry or draw(st.booleans())
    return replace(
        case,
        source=world.source,
        seeds=_few(case),
        question=f"{world.source}{waits}{asked}",
        flip=draw(st.sampled_from(DONE)),
        column="done",
        value="False",
        claim="{'claimed': True}" if marks else None,
        meeting=_met(case, trouble),
        at=0,
        trouble=trouble,
        failed="{'dead': True}" if trouble.retry or draw(st.booleans()) else None,
        reset="{'claimed': False}" if marks and put_back else None,
    )


#: Rows whose handlers do more than succeed, since several runs come to them.
MOST = 4

#: Flips of a row whose other flags say that it waits.
DONE = ("{'done': True}",) * 3 + ("{'done': lambda: True}", "{'done': True, 'result': 'a'}")


def _few(case: Case) -> Sequence[int]:
    """Return the seeds of a few rows, all of which have the value that is asked for."""
    return [seed if seed % 4 else seed + 1 for seed in case.seeds[:MOST]]


def _met(case: Case, trouble: Trouble) -> str:
    """Return how the copies meet: the gate is in one session, and no stranger comes."""
    return RACE if trouble.is_async or case.meeting == STRANGER else case.meeting


@st.composite
def plain_cases(draw: st.DrawFn, delivery: Delivery) -> Case:
    """Return examples in which every handler succeeds."""
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
        draw(
            st.sampled_from(
                ({}, {}, {}, {"batch_size": 3}, {"strict_order": True}, {"batch_size": 2})
            )
        ),
    )
