"""What became of the workers of one run, each of which may have had a successor."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from dcl_processor.diagnosis import Trouble
from dcl_processor.report import Report
from dcl_processor.signals import OnRow

from .news import Died, Finishing, News

logger = logging.getLogger("dcl_processor")


class Outcomes:
    """The outcomes of the workers of one run; ``limits``: the rows that each may still try."""

    def __init__(
        self,
        name: str,
        limits: list[int | None],
        on_row: OnRow | None,
        on_finishing: Callable[[int, Finishing], None],
    ) -> None:
        self.limits = limits
        self._name = name
        self._on_row = on_row
        self._on_finishing = on_finishing
        self._outcomes: dict[int, Report | Trouble] = {}
        self._deaths: dict[int, list[Trouble]] = {}

    def tell(self, number: int, _: str | None, event: News) -> None:
        """Take what happened to a worker."""
        match event:
            case str():
                self._count(number)
                if self._on_row is not None:
                    self._on_row(event)
            case Report() | Trouble():
                self._outcomes[number] = event
            case Died() if number not in self._outcomes:
                # A worker that dies after its report has done all of its work.
                self._deaths.setdefault(number, []).append(event.trouble)
                logger.error("%s, worker %d: %s", self._name, number, event.trouble.sentence)
            case Finishing():
                self._on_finishing(number, event)

    def in_order(self) -> list[Report | Trouble]:
        """Return one outcome for each worker, by number."""
        numbers = sorted({*self._outcomes, *self._deaths})
        return [self._of(number) for number in numbers]

    def _count(self, number: int) -> None:
        # A worker that takes this one's place has one row less to try.
        if left := self.limits[number - 1]:
            self.limits[number - 1] = left - 1

    def _of(self, number: int) -> Report | Trouble:
        outcome, deaths = self._outcomes.get(number), self._deaths.get(number, [])
        if not deaths:
            assert outcome is not None
            return outcome
        sentences = [trouble.sentence for trouble in deaths]
        report = outcome if isinstance(outcome, Report) else None
        if isinstance(outcome, Trouble):
            sentences.append(outcome.sentence)
            report = outcome.report
        words = "; then ".join(sentences)
        return replace(deaths[-1], sentence=words, report=report, is_logged=True)
