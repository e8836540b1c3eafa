"""The circuit breaker: how many failures in a row, over all machines, pause a processor."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from datetime import timedelta

from dcl_processor.values import DAY, expect_seconds, expect_whole_number, seconds


@dataclass(frozen=True, slots=True)
class Breaker:
    """Pause a processor on all machines after so many failures in a row.

    ``failures``: rows that fail one after the other, in all workers together, with no success in
    between. ``pause``: seconds (or a ``timedelta``), from 1 to a day, for which no row starts. Then
    one worker tries one row: if it succeeds, all workers continue; if it fails, the pause begins
    again. It needs the app ``dcl_processor.ledger``.

    The pattern is Nygard's circuit breaker: open, half-open, closed.
    """

    failures: int = 5
    _: KW_ONLY
    pause: float | timedelta = 60

    def __post_init__(self) -> None:
        expect_whole_number("expected a Breaker's failures", self.failures, of="rows", least=1)
        expect_seconds("expected a Breaker's pause", self.pause, least=1, most=DAY)

    @property
    def seconds(self) -> float:
        return seconds(self.pause)
