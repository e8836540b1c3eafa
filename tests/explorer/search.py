"""Who moves next: every choice there is, a random one, or those that were written down.

Every schedule is tried by running it from its beginning: the choices up to the last one that has
an alternative are made again, and then that alternative. Sleep sets (Godefroid) leave out what is
known: an alternative that was tried at a choice sleeps until an actor takes a step that does not
commute with it, since until then it would lead to a schedule that was tried already.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from .steps import Step


class Pruned(Exception):
    """Whatever comes next was tried already, in another order of steps that commute."""


class Chooser(Protocol):
    def pick(self, options: Mapping[int, Step | None]) -> int:
        """Return the actor who moves, or the side of a die (whose steps are ``None``)."""
        raise NotImplementedError


@dataclass
class _Node:
    options: dict[int, Step | None]
    asleep: dict[int, Step]
    chosen: int
    tried: list[int] = field(default_factory=list)

    def asleep_below(self) -> dict[int, Step]:
        step = self.options[self.chosen]
        if step is None:
            return self.asleep  # a die changes nothing that the others see
        before = {**self.asleep}
        for each in self.tried:
            tried = self.options[each]
            assert tried is not None
            before[each] = tried
        return {each: other for each, other in before.items() if other.commutes_with(step)}

    def untried(self) -> list[int]:
        return [
            each for each in self.options if each not in self.asleep | dict.fromkeys(self.tried)
        ]


class Search:
    """Depth first, through every schedule; ``reduced``: one of those that are one and the same."""

    def __init__(self, *, reduced: bool) -> None:
        self._reduced = reduced
        self._nodes: list[_Node] = []
        self._depth = 0

    def pick(self, options: Mapping[int, Step | None]) -> int:
        if self._depth == len(self._nodes):
            asleep = self._nodes[-1].asleep_below() if self._nodes and self._reduced else {}
            awake = [each for each in options if each not in asleep]
            if not awake:
                raise Pruned
            self._nodes.append(_Node(dict(options), asleep, awake[0]))
        node = self._nodes[self._depth]
        assert node.options == options, f"expected {node.options} again, got {options}"
        self._depth += 1
        return node.chosen

    def go_on(self) -> bool:
        """Turn to the next schedule; tell whether there is one."""
        self._depth = 0
        while self._nodes:
            node = self._nodes[-1]
            node.tried.append(node.chosen)
            if untried := node.untried():
                node.chosen = untried[0]
                return True
            self._nodes.pop()
        return False


class Dice:
    """Random schedules; the same seed gives the same one."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311  # no secret

    def pick(self, options: Mapping[int, Step | None]) -> int:
        return self._random.choice(list(options))


class Priorities:
    """Random schedules of few switches (PCT): the actor of the highest priority moves.

    At a few random steps the one that moves falls behind all others. Most races take two or three
    switches, at the right places, which such a schedule has more often than one of ``Dice``.
    """

    #: Of an average schedule, among which the places of the switches are.
    STEPS = 50

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311  # no secret
        self._switches = {self._random.randrange(self.STEPS) for _ in range(2)}
        self._priorities: dict[int, float] = {}
        self._steps = 0

    def pick(self, options: Mapping[int, Step | None]) -> int:
        for each, step in options.items():
            if step is None:
                return self._random.choice(list(options))
            self._priorities.setdefault(each, self._random.random())
        chosen = max(options, key=self._priorities.__getitem__)
        if self._steps in self._switches:
            self._priorities[chosen] = -self._steps
            chosen = max(options, key=self._priorities.__getitem__)
        self._steps += 1
        return chosen


#: Parts of a schedule: an actor moves until it is about to take a step of that name, or has ended.
Parts = Sequence[tuple[int, str]]


class After:
    """A schedule whose beginning is given; from there on, another chooser picks."""

    def __init__(self, parts: Parts, then: Chooser) -> None:
        self._parts, self._then = list(parts), then
        #: Whether its actor has moved in the part at hand: the step may be one of that name.
        self._has_moved = False

    def pick(self, options: Mapping[int, Step | None]) -> int:
        while self._parts:
            actor, name = self._parts[0]
            step = options.get(actor)
            if None in options.values():
                return next(iter(options))
            if step is not None and not (self._has_moved and step.name == name):
                self._has_moved = True
                return actor
            self._parts.pop(0)
            self._has_moved = False
        return self._then.pick(options)


class Written:
    """A schedule as it was printed; where it ends, the first actor that can moves."""

    def __init__(self, digits: str) -> None:
        self._digits = iter(digits)

    def pick(self, options: Mapping[int, Step | None]) -> int:
        chosen = int(next(self._digits, next(iter(options))))
        assert chosen in options, f"expected one of {[*options]}, got {chosen}"
        return chosen
