"""The monkey deals blows from a shuffled deck; a seed makes it deal the same ones again."""

from __future__ import annotations

import random
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import psutil
import psycopg

from .blows import DECK, Blow, Reach, Strike

#: Blows that hold something, at once.
MOST_AT_ONCE = 4


class Monkey:
    """Deals one blow after the other; those that take a while go on beside the next ones."""

    def __init__(self, reach: Reach, *, pause: float) -> None:
        self._reach = reach
        self._pause = pause  # seconds between two blows, on average
        self._deck: list[Strike] = []
        self._pool = ThreadPoolExecutor(MOST_AT_ONCE)
        self._under_way: list[Future[None]] = []
        self.blows: list[Blow] = []
        self.decks = 0  # that were dealt to the end
        self.cut_short: list[str] = []  # blows that another one cut short

    def strike(self) -> None:
        """Wait a little, and deal one blow."""
        dice = self._reach.dice
        time.sleep(dice.uniform(0.2, 1.8) * self._pause)
        if not self._deck:
            self._deck = [strike for strike in DECK for _ in range(DECK[strike][0])]
            dice.shuffle(self._deck)
        strike = self._deck.pop()
        # Dice of its own: which blow comes next does not hang on what runs beside.
        reach = replace(self._reach, dice=random.Random(dice.random()))  # noqa: S311  # no secret
        _, holds = DECK[strike]
        if holds:
            self._under_way = [each for each in self._under_way if not each.done()]
            self._under_way.append(self._pool.submit(self._deal, strike, reach))
        else:
            self._deal(strike, reach)
        self.decks += not self._deck

    def end(self) -> None:
        """Let go of what is held."""
        for each in self._under_way:
            each.result()
        self._pool.shutdown()

    def _deal(self, strike: Strike, reach: Reach) -> None:
        blow = Blow(strike.__name__, time.monotonic())
        # Known before it is over: the judge has to know of one that was dealt in half, too.
        self.blows.append(blow)
        try:
            strike(reach, blow)
        except (psycopg.Error, psutil.Error) as error:
            # The server was being restarted, or was full: another blow was quicker.
            self.cut_short.append(f"{blow.kind}: {type(error).__name__}: {str(error).strip()}")
        finally:
            blow.ended = time.monotonic()
