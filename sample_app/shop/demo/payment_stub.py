"""A payment gateway that logs every charge, and sometimes answers late, wrongly or not at all."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

from sample_app.shop.demo.http_stub import Answer, HttpStub, Request

SLOW = 0.3  # seconds, within a client's timeout
TOO_SLOW = 3.0  # seconds, beyond a client's timeout


class Mood(Enum):
    """How the gateway responds to the first request for an order's charge."""

    SLOW = auto()  # charges, and answers late
    BUSY = auto()  # does not charge, and answers so
    REFUSING = auto()  # never charges, and answers so every time
    CHARGED_IN_SILENCE = auto()  # charges, and answers when the client has given up
    LOST = auto()  # does not charge, and does not answer


PAUSES = {Mood.SLOW: SLOW, Mood.CHARGED_IN_SILENCE: TOO_SLOW}


@dataclass(frozen=True, slots=True)
class Charge:
    """One line of the gateway's log."""

    charge_id: str
    order: int
    amount: str


class PaymentStub(HttpStub):
    """POST /charges charges a card at each request; GET /charges/ORDER looks a charge up."""

    def __init__(self, moods: Mapping[int, Mood], *, holding: int | None = None) -> None:
        """Take the moods by order number.

        The charge with the number ``holding`` in the log is made but not answered; ``held`` is
        then the process that waits for it, until ``let_go()``.
        """
        super().__init__()
        self.log: list[Charge] = []  # only ever appended to
        self.held: int | None = None
        self._moods = dict(moods)
        self._holding = holding
        self._gone = threading.Event()
        self._lock = threading.Lock()
        self._serial = itertools.count(1)

    def let_go(self) -> None:
        """End the wait of the process that is held."""
        self.held = None
        self._gone.set()

    def answer(self, request: Request) -> Answer | None:
        """Charge a card, or look a charge up."""
        if request.method == "GET":
            return self._found(int(request.path.rpartition("/")[2]))
        order, amount = request.body["order"], request.body["amount"]
        with self._lock:
            mood = self._moods.get(order)
            if mood is not Mood.REFUSING:
                self._moods.pop(order, None)
        if mood is Mood.BUSY:
            return Answer(503, {"error": "busy"})
        if mood is Mood.REFUSING:
            return Answer(402, {"error": "card refused"})
        if mood is Mood.LOST:
            self.closing.wait(TOO_SLOW)
            return None
        charge, number = self._charge(order, amount)
        if number == self._holding:
            self.held = int(request.headers["User-Agent"].rpartition("/")[2])
            self._gone.wait(TOO_SLOW)
            return None
        self.closing.wait(PAUSES.get(mood, 0) if mood else 0)
        return Answer(201, {"id": charge.charge_id})

    def _charge(self, order: int, amount: str) -> tuple[Charge, int]:
        with self._lock:
            charge = Charge(f"ch_{order}_{next(self._serial)}", order, amount)
            self.log.append(charge)
            return charge, len(self.log)

    def _found(self, order: int) -> Answer:
        found = next((charge for charge in self.log if charge.order == order), None)
        return Answer(200, {"id": found.charge_id}) if found else Answer(404, None)
