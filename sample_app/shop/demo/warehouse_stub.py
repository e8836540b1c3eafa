"""A warehouse that is slow, sometimes fails, and logs every order that arrives."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from random import Random

from sample_app.shop.demo.http_stub import Answer, HttpStub, Request

LEAST, MOST = 0.01, 0.06  # seconds for a usual answer
TOO_SLOW = 3.0  # seconds, beyond a client's timeout


class Mood(Enum):
    """How the warehouse responds to an order that arrives for the first time."""

    DOWN = auto()  # does not take it, and answers so
    CONFUSED = auto()  # takes it, and answers that it did not
    SILENT = auto()  # takes it, and does not answer before the client has given up


@dataclass(frozen=True, slots=True)
class Arrival:
    """One line of the warehouse's log; acknowledged: the client got a successful answer."""

    order: int
    key: str
    acknowledged: bool


class WarehouseStub(HttpStub):
    """PUT /orders/NUMBER takes an order; its idempotency key shows whether it is new."""

    def __init__(self, moods: Mapping[int, Mood], *, seed: int = 1) -> None:
        """Take the moods by order number."""
        super().__init__()
        self.log: list[Arrival] = []  # only ever appended to
        self._moods = dict(moods)
        self._lock = threading.Lock()
        self._chance = Random(seed)  # noqa: S311 - nothing here is a secret

    @property
    def to_pack(self) -> set[str]:
        """The orders that are to be packed: once each, however often they arrived."""
        return {arrival.key for arrival in self.log}

    def answer(self, request: Request) -> Answer | None:
        """Take an order."""
        order = int(request.path.rpartition("/")[2])
        with self._lock:
            mood = self._moods.pop(order, None)
            pause = self._chance.uniform(LEAST, MOST)
        self.closing.wait(pause)
        if mood is Mood.DOWN:
            return Answer(503, {"error": "down"})
        with self._lock:
            self.log.append(Arrival(order, request.headers["Idempotency-Key"], mood is None))
        if mood is Mood.SILENT:
            self.closing.wait(TOO_SLOW)
            return None
        return Answer(500, {"error": "?"}) if mood is Mood.CONFUSED else Answer(200, {})
