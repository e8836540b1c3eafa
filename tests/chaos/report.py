"""The result as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

COUNTS = (
    *("rows", "withdrawn", "called_0", "called_1", "called_2+", "done", "in_doubt"),
    *("requeued", "given_up", "work_doubled", "settled_twice", "unexplained", "faults"),
    *("calm_rows_per_second", "chaos_rows_per_second", "after_rows_per_second"),
    *("ratio", "ratio_after", "chaos_seconds", "longest_pause"),
)


def text(result: Mapping[str, Any]) -> str:
    """Return what a person wants to see of the result."""
    deliveries = result["deliveries"]
    names = list(deliveries)
    counts = [[count, *(str(deliveries[name][count]) for name in names)] for count in COUNTS]
    kinds = sorted({kind for name in names for kind in deliveries[name]["recovery"]})
    recovery = [
        [kind, *(_recovery(deliveries[name]["recovery"].get(kind)) for name in names)]
        for kind in kinds
    ]
    blows = ", ".join(f"{kind} {number}" for kind, number in result["blows"].items())
    first = (
        f"\nBlows: {blows}; {len(result['cut_short'])} of them were cut short by others.\n"
        f"Workers killed: {result['workers_killed']}; "
        f"sessions ended one by one: {result['sessions_ended']}.\n"
    )
    flow = ["seconds until rows flow, median (worst)", *names]
    return "\n".join([first, *_table(["", *names], counts), "", *_table(flow, recovery), ""])


def _recovery(summary: Mapping[str, float] | None) -> str:
    return f"{summary['median']:.2f} ({summary['worst']:.2f})" if summary else "-"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = []
    for first, *others in (head, *rows):
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return lines
