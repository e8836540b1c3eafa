"""The figures as the documentation shows them: tables in Markdown, beside the drawings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from statistics import median

from . import network_table
from .measuring import Measurement
from .targets import TARGETS, verdict

TARGET_HEADINGS = ("what", "target", "median", "lowest", "highest", "")
RATE_HEADINGS = (
    "scenario",
    "contender",
    "workers",
    "rows",
    "rows/s",
    "lowest",
    "highest",
    "CPU ms/row",
)


def write(results: Sequence[Measurement], server: Mapping[str, str], folder: Path) -> None:
    """Write tables to be included in a page: server, targets and rates."""
    for name, table in tables(results, server).items():
        (folder / f"benchmark-{name}.inc").write_text("\n".join(table) + "\n")


def tables(
    results: Sequence[Measurement], server: Mapping[str, str]
) -> Mapping[str, Iterable[str]]:
    """Return the lines of each table.

    Networks have tables of their own, and with them a server: they can be measured in another run.
    """
    made: dict[str, Iterable[str]] = {}
    networks: list[Measurement] = []
    others: list[Measurement] = []
    for scenario in dict.fromkeys(result.scenario for result in results):
        of_it = [result for result in results if result.scenario == scenario]
        if network_table.is_about_networks(of_it):
            networks += of_it
            made[scenario] = _table(network_table.headings(of_it), network_table.lines(of_it))
        else:
            others += of_it
    for prefix, group in (("", others), ("network-", networks)):
        if group:
            made[f"{prefix}server"] = _table(("what", "value"), server.items())
            made[f"{prefix}rates"] = _table(RATE_HEADINGS, _rates(group))
    if others:
        made["targets"] = _table(TARGET_HEADINGS, _targets(results))
    return made


def _targets(results: Sequence[Measurement]) -> Iterator[Sequence[str]]:
    for target in TARGETS:
        if found := verdict(target, results):
            middle, least, most = found
            figures = (f"{figure:.2f}" for figure in (middle, least, most))
            met = "met" if target.is_met(middle) else "**missed**"
            yield target.what, str(target), *figures, met


def _rates(results: Sequence[Measurement]) -> Iterator[Sequence[str]]:
    has_networks = network_table.is_about_networks(results)

    def key(result: Measurement) -> tuple[str, int, str]:
        scenario = f"{result.scenario}, {result.network}" if has_networks else result.scenario
        return scenario, result.workers, result.name

    order = list(dict.fromkeys(map(key, results)))
    for (scenario, workers, name), group in groupby(
        sorted(results, key=lambda result: order.index(key(result))), key
    ):
        of_it = list(group)
        rates = [result.figures["rate"] for result in of_it]
        yield (
            *(scenario, name, str(workers), f"{of_it[0].rows:,}", f"{median(rates):,.0f}"),
            *(f"{min(rates):,.0f}", f"{max(rates):,.0f}"),
            _cpu(of_it),
        )


def _cpu(results: Sequence[Measurement]) -> str:
    values = [r.figures["CPU ms per row"] for r in results if "CPU ms per row" in r.figures]
    return f"{median(values):.3f}" if values else network_table.NOTHING


def _table(headings: Sequence[str], lines: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(headings)} |"
    yield f"|{'---|' * len(headings)}"
    for line in lines:
        yield f"| {' | '.join(line)} |"
