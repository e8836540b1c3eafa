"""The figures as the documentation shows them: tables in Markdown, beside the drawings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from statistics import median

from . import network_table
from .measuring import COMMITS, MESSAGES, Measurement
from .targets import TARGETS, verdict


def write(results: Sequence[Measurement], server: Mapping[str, str], folder: Path) -> None:
    """Write tables to be included in a page: server, targets, rates, and one for each network."""
    tables = {
        "server": _table(("what", "value"), server.items()),
        "targets": _table(("what", "target", "median", "lowest", "highest", ""), _targets(results)),
        "rates": _table(
            (
                "scenario",
                "contender",
                "network",
                "copies",
                "rows",
                "rows/s",
                "lowest",
                "highest",
                "CPU ms/row",
                "messages/row",
                "commits/row",
            ),
            _rates(results),
        ),
    }
    for scenario in dict.fromkeys(result.scenario for result in results):
        of_it = [result for result in results if result.scenario == scenario]
        if network_table.is_about_networks(of_it):
            name = scenario.replace(", ", "-")
            tables[name] = _table(network_table.headings(of_it), network_table.lines(of_it))
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
    def key(result: Measurement) -> tuple[str, str, int, str]:
        return result.scenario, result.network, result.copies, result.name

    order = list(dict.fromkeys(map(key, results)))
    for (scenario, network, copies, name), group in groupby(
        sorted(results, key=lambda result: order.index(key(result))), key
    ):
        of_it = list(group)
        rates = [result.figures["rate"] for result in of_it]
        yield (
            *(scenario, name, network, str(copies), f"{of_it[0].rows:,}"),
            *(f"{figure:,.0f}" for figure in (median(rates), min(rates), max(rates))),
            *(_cell(of_it, figure) for figure in ("CPU ms per row", MESSAGES, COMMITS)),
        )


def _cell(results: Sequence[Measurement], figure: str) -> str:
    values = [result.figures[figure] for result in results if figure in result.figures]
    return f"{median(values):.3f}" if values else network_table.NOTHING


def _table(headings: Sequence[str], lines: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(headings)} |"
    yield f"|{'---|' * len(headings)}"
    for line in lines:
        yield f"| {' | '.join(line)} |"
