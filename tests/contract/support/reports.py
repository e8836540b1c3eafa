"""What a run reported, compared as a whole."""

from __future__ import annotations

from typing import Any, TypedDict, Unpack

from dcl_processor import Report
from dcl_processor.report.report import COUNTS, Stopped


class Counts(TypedDict, total=False):
    """The rows of a run by what became of them; ``redone`` and ``passes`` are compared if named."""

    processed: int
    failed: int
    discarded: int
    snoozed: int
    skipped: int
    stale: int
    lease_lost: int
    to_retry: int
    held: int
    redone: int
    passes: int


def assert_run(report: Report, *, stopped: Stopped = "drained", **named: Unpack[Counts]) -> None:
    """Compare all counts of a run and what ended it; a count that is not named has to be 0."""
    expected: dict[str, Any] = dict.fromkeys((*COUNTS, "to_retry"), 0)
    expected |= {**named, "stopped": stopped}
    wrong = {name: value for name, value in expected.items() if getattr(report, name) != value}
    assert not wrong, (
        f"expected {', '.join(f'{name}={value!r}' for name, value in wrong.items())}, "
        f"got {report!r}, failures: {[(each.pk, each.error) for each in report.failures]}"
    )
