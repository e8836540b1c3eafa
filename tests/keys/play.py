"""One round: rows are handled while trouble is made, and the log is judged."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tests.waiting import until

from .crew import SKEWS, Crew, Round

#: Rows for which trouble of each kind is made once.
ROWS_PER_TROUBLE = 100


@dataclass
class Result:
    """What became of a round; ``most``: rows of a key that were in flight at any moment."""

    rows: int = 0
    seconds: float = 0.0
    most: int = 0
    held: int = 0
    troubles: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    @property
    def speed(self) -> float:
        return self.rows / self.seconds if self.seconds else 0.0


def play(crew: Crew, of: Round, rows: int, work: float) -> Result:
    """Let the workers handle rows while trouble is made, and judge the log."""
    from tests.models import Errand

    from . import audit, table
    from .processors import MODES
    from .troubles import Troubles

    waits = table.fill(rows, SKEWS[of.skew])
    troubles = Troubles(of.delivery, of.mode, waits, times=max(2, rows // ROWS_PER_TROUBLE))
    troubles.start()
    crew.begin(of, work)
    try:
        _wait_until_done()
    finally:
        troubles.end()
    _wait_until_done()  # the rows that came at last
    reports = [report for reports in crew.end() for report in reports]
    lines = table.log()
    options, most = MODES[of.mode]
    verdict = audit.judge(
        lines,
        waits,
        most=most,
        in_order="in_order" in options,
        claims=of.delivery != "transactional",
    )
    expected = Counter(Errand.objects.values_list("pk", flat=True)) + troubles.again
    result = Result(sum(expected.values()), most=verdict.most, troubles=troubles.made)
    result.faults = verdict.faults
    if wrong := {row: number for row, number in verdict.handled.items() if number != expected[row]}:
        result.faults.append(f"rows were handled so often: {wrong}")
    if lost := expected.keys() - verdict.handled.keys():
        result.faults.append(f"rows were not handled: {sorted(lost)}")
    if failed := sum(failed for _, failed, _ in reports):
        result.faults.append(f"{failed} rows failed")
    begun = [line.at for line in lines if line.what == "begin"]
    result.seconds = max(line.at for line in lines if line.what == "done") - min(begun)
    result.held = sum(held for *_, held in reports)
    return result


def _wait_until_done() -> None:
    from tests.models import Errand

    waiting = Errand.objects.filter(done=False)
    while left := waiting.count():
        until(lambda: waiting.count() != left, "a row to be handled", pause=0.1)
