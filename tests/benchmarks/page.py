"""The figures as the documentation shows them: tables in Markdown, beside the drawings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from statistics import median

from .measuring import Measurement
from .targets import TARGETS, verdict


def write(results: Sequence[Measurement], server: Mapping[str, str], folder: Path) -> None:
    """Write three tables to be included in a page: server, targets and rates."""
    tables = {
        "server": _table(("what", "value"), server.items()),
        "targets": _table(("what", "target", "median", "lowest", "highest", ""), _targets(results)),
        "rates": _table(
            (
                "scenario",
                "contender",
                "copies",
                "rows",
                "rows/s",
                "lowest",
                "highest",
                "CPU ms/row",
            ),
            _rates(results),
        ),
    }
    for name, lines in tables.items():
        (folder / f"benchmark-{name}.inc").write_text("\n".join(lines) + "\n")


def _targets(results: Sequence[Measurement]) -> Iterator[Sequence[str]]:
    for target in TARGETS:
        if found := verdict(target, results):
            middle, least, most = found
            figures = (f"{figure:.2f}" for figure in (middle, least, most))
            met = "met" if target.is_met(middle) else "**missed**"
            yield target.what, str(target), *figures, met


def _rates(results: Sequence[Measurement]) -> Iterator[Sequence[str]]:
    def key(result: Measurement) -> tuple[str, int, str]:
        return result.scenario, result.copies, result.name

    order = list(dict.fromkeys(map(key, results)))
    for (scenario, copies, name), group in groupby(
        sorted(results, key=lambda result: order.index(key(result))), key
    ):
        of_it = list(group)
        rates = [result.figures["rate"] for result in of_it]
        yield (
            *(scenario, name, str(copies), f"{of_it[0].rows:,}", f"{median(rates):,.0f}"),
            *(f"{min(rates):,.0f}", f"{max(rates):,.0f}"),
            _cpu(of_it),
        )


def _cpu(results: Sequence[Measurement]) -> str:
    values = [r.figures["CPU ms per row"] for r in results if "CPU ms per row" in r.figures]
    return f"{median(values):.3f}" if values else "–"


def _table(headings: Sequence[str], lines: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(headings)} |"
    yield f"|{'---|' * len(headings)}"
    for line in lines:
        yield f"| {' | '.join(line)} |"
