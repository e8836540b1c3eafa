"""One example: a world with rows, a question, flips, and how two workers are to meet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from django.db import connection
from django.db.models import QuerySet
from hypothesis import strategies as st

from dcl_processor import Delivery, Lease, Retry
from tests.fuzz.flips import claim, flip, possible
from tests.fuzz.questions import heart, link, question
from tests.fuzz.troubles import BEFORE, Touch, Trouble, troubles
from tests.fuzz.words import VALUES, meaning, mostly
from tests.fuzz.worlds import WORKERS, WORLDS, World

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
    #: What handlers do beside succeeding, and the texts of ``failed`` and ``reset``, if there are.
    trouble: Trouble | None = None
    failed: str | None = None
    reset: str | None = None
    #: The rows of one window: so few that a few rows are several windows.
    window: int = 2

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
            **({"batch_size": 3} if self.trouble.is_async and not self.key else {}),
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
            given = wanted if seed % 4 else {}
            self.world.make(number, seed, {**given, **self._key_of(number)})

    def _key_of(self, number: int) -> dict[str, Any]:
        """Return one key for most rows, and another one, or none, for the others."""
        key = self.key
        if key is None or key not in self.world.own or key == self.column:
            return {}
        kind = self.world.own[key]
        values = VALUES[kind.rstrip("?")]
        other = "None" if kind.endswith("?") else values[1]
        return {key: meaning(values[0] if number % 3 else other)}

    @property
    def key(self) -> str | None:
        """The option ``group_by``."""
        name: str | None = self.options.get("group_by")
        return name

    @property
    def spare(self) -> str | None:
        """A text column that neither asks nor is written: the handler may write it itself."""
        if self.trouble is not None and self.trouble.touch == Touch.SAVE:
            return None  # which writes back what the instance says
        for name in ("note", "plate"):
            asked = f"{self.question} {self.flip} {self.claim}"
            if name in self.world.own and name not in asked and name not in (self.column, self.key):
                return name
        return None

    def rows(self, using: str = "default") -> QuerySet[Any]:
        """Return all rows of the table, those that a manager hides included."""
        return QuerySet(self.world.model, using=using)


def cases(delivery: Delivery) -> st.SearchStrategy[Case]:
    """Return examples; in every second one the handlers do more than succeed."""
    plain, working = plain_cases(delivery), working_cases(delivery)
    troubled, keyed = troubled_cases(plain, delivery), keyed_cases(delivery)
    # Where keys are refused, a sample of them would be wasted.
    last = troubled if connection.vendor == "mysql" else keyed
    kinds = (plain, plain, plain, working, working, troubled, last)
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
    trouble = _touched(trouble, met)
    return replace(case, trouble=trouble, failed=failed, meeting=met, seeds=_few(case))


@st.composite
def working_cases(draw: st.DrawFn, delivery: Delivery) -> Case:
    """Return examples over the models that have every column that a delivery may write."""
    world = draw(st.sampled_from(WORKERS))
    case = draw(plain_cases(delivery))
    trouble = draw(troubles(delivery, retry=True, touched=True))
    # A mark beside the lease, under which its row stays pending; the lease has the one time.
    beside = delivery == Delivery.AT_LEAST_ONCE and case.timed
    waits = MARKED if beside else ".filter(claimed=False, dead=False)"
    asked = draw(heart(world, "done", "False")) + draw(mostly(st.just(""), link(world)))
    marks = delivery == Delivery.AT_MOST_ONCE and (trouble.retry or draw(st.booleans()))
    marks = marks or beside
    put_back = beside or trouble.retry or draw(st.booleans())
    met = _met(case, trouble)
    return replace(
        case,
        source=world.source,
        seeds=_few(case),
        question=f"{world.source}{waits}{asked}",
        flip="{'done': True, 'claimed': False}" if beside else draw(st.sampled_from(DONE)),
        column="done",
        value="False",
        claim="{'claimed': True}" if marks else None,
        timed=case.timed and not beside,
        meeting=met,
        at=0,
        trouble=_touched(trouble, met),
        failed="{'dead': True}" if trouble.retry or draw(st.booleans()) else None,
        reset="{'claimed': False}" if marks and put_back else None,
    )


@st.composite
def steady_cases(draw: st.DrawFn, delivery: Delivery, *, lapses: bool) -> Case:
    """Return examples whose flips may wait for the next claim, because no flip is in doubt.

    ``lapses``: whether leases lapse, too.

    The rows of one window are claimed one after the other; those that succeed come first.
    """
    case = draw(working_cases(delivery))
    marks = delivery == Delivery.AT_MOST_ONCE
    assert case.trouble is not None
    seeds = draw(st.lists(st.integers(0, 249), min_size=MOST, max_size=2 * MOST))
    trouble = replace(
        case.trouble,
        plans=[*[()] * MOST, *case.trouble.plans],
        # Where statements are counted, each is sent alone.
        lapse=case.trouble.lapse if lapses and not isinstance(case.trouble.lapse, int) else None,
        is_async=False,
    )
    return replace(
        case,
        question=f"{case.source}.filter(claimed=False, dead=False, done=False)",
        flip="{'done': True}",
        # Without a claim the flip comes before the work.
        claim="{'claimed': True}" if marks else None,
        reset="{'claimed': False}" if marks else None,
        seeds=[4 * seed + 1 for seed in seeds],
        trouble=_touched(trouble, RACE),
        meeting=RACE,
        window=2 * MOST,
        options={},
    )


#: What a key may be, by the kinds of ``VALUES``.
KEYS = ("bool", "int", "text", "date", "uuid", "colour", "word")

MODES: tuple[Mapping[str, Any], ...] = ({}, {"in_order": True}, {"max_per_group": 2})


@st.composite
def keyed_cases(draw: st.DrawFn, delivery: Delivery) -> Case:
    """Return examples with keys: columns, or relations, that nothing writes."""
    kinds = (plain_cases(delivery), working_cases(delivery))
    case = draw(draw(st.sampled_from(kinds)))
    written = f"{case.flip} {case.claim} {case.failed} {case.reset}"
    own = [name for name, kind in case.world.own.items() if kind.rstrip("?") in KEYS]
    names = [name for name in own if repr(name) not in written and name != case.column]
    names += ["depot"] * ("depot" in case.world.one and "depot" not in written)
    # Seldom a flag, if there is anything else.
    names = [name for name in names if case.world.own.get(name) != "bool"] or names
    if not names:
        return case
    mode = draw(st.sampled_from(MODES))
    orders = ("", ".order_by('pk')", ".order_by('-pk')", f".order_by({case.column!r})")
    order = draw(st.sampled_from(orders)) if mode.get("in_order") else ""
    marks = case.claim
    if delivery == Delivery.AT_MOST_ONCE and case.trouble is not None:
        marks = "{'claimed': True}"
    return replace(
        case,
        question=f"{case.question}{order}",
        claim=marks,
        timed=delivery == Delivery.AT_MOST_ONCE,
        reset="{'claimed': False}" if marks and case.trouble is not None else case.reset,
        meeting=BETWEEN if case.meeting == STRANGER else case.meeting,
        options={"group_by": draw(st.sampled_from(names)), **mode},
    )


#: What waits, and what has a mark as long as it has a lease.
MARKED = f".filter(Q(claimed=False) | Q(claimed=True, {CLOCK}__isnull=False), dead=False)"

#: Rows whose handlers do more than succeed, since several runs come to them.
MOST = 4

#: Flips of a row whose other flags say that it waits.
DONE = ("{'done': True}",) * 3 + ("{'done': lambda: True}", "{'done': True, 'result': 'a'}")


def _few(case: Case) -> Sequence[int]:
    """Return the seeds of a few rows, all of which have the value that is asked for."""
    return [seed if seed % 4 else seed + 1 for seed in case.seeds[:MOST]]


def _touched(trouble: Trouble, meeting: str) -> Trouble:
    """Return the trouble without a ``save()`` that writes back what another copy has written since.

    In a race a copy may take the row between the end of its lease and that ``save()``.
    """
    overwrites = meeting == RACE and trouble.lapse == BEFORE and trouble.touch == Touch.SAVE
    return replace(trouble, touch=Touch.REFRESH) if overwrites else trouble


def _met(case: Case, trouble: Trouble) -> str:
    """Return how the workers meet: the gate is in one session, and no stranger comes."""
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
