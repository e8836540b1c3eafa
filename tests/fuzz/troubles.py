"""Strategies for handlers that fail, put off, discard, touch their own row or lose their lease."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from hypothesis import strategies as st

from dcl_processor import Delivery


class Act(StrEnum):
    """What a handler does at the end of one call."""

    SUCCEED = "succeed"
    RAISE = "raise"
    SNOOZE = "snooze"
    DISCARD = "discard"


class Touch(StrEnum):
    """What a handler does to its own row meanwhile."""

    NOTHING = "nothing"
    SAVE = "save"
    REFRESH = "refresh"
    LOCK = "lock"


#: When a lease lapses: before or after the handler touches its row, or so many statements after
#: the handler has ended.
BEFORE, AFTER = "before", "after"
Lapse = str | int


@dataclass(frozen=True)
class Trouble:
    #: What the handler does at its first calls for a row, for each row; then it succeeds.
    plans: Sequence[Sequence[Act]]
    #: Whether the row has retry columns: two attempts, without a backoff.
    retry: bool
    touch: Touch
    #: When the lease of some rows lapses in their first call, and another copy comes.
    lapse: Lapse | None
    #: Whether handlers are coroutines, which end together.
    is_async: bool
    #: Whether rows that were settled become pending again.
    again: bool

    def plan(self, place: int) -> Sequence[Act]:
        return self.plans[place % len(self.plans)]

    def lapses(self, place: int) -> bool:
        return self.lapse is not None and place % 2 == 0


@st.composite
def troubles(draw: st.DrawFn, delivery: Delivery, *, retry: bool, touched: bool) -> Trouble:
    """``retry``: whether the model has the columns; ``touched``: whether ``save()`` finds it."""
    failing = (Act.RAISE, Act.RAISE, Act.SNOOZE, Act.DISCARD, Act.SUCCEED)
    lapses: tuple[Lapse | None, ...] = (None,)
    if delivery == Delivery.AT_LEAST_ONCE:
        lapses = (None, None, BEFORE, AFTER, 0, 1, 1, 2)
    outside = delivery != Delivery.TRANSACTIONAL
    return Trouble(
        draw(st.lists(st.lists(st.sampled_from(failing), max_size=3), min_size=1, max_size=4)),
        retry and draw(st.sampled_from((True, True, False))),
        draw(st.sampled_from(tuple(Touch))) if touched else Touch.NOTHING,
        draw(st.sampled_from(lapses)),
        outside and draw(st.sampled_from((False, False, True))),
        draw(st.sampled_from((False, False, True))),
    )
