"""The figures as the documentation shows them: tables in Markdown, beside the drawings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from statistics import median

from .measuring import DELAY, MESSAGES, PROCESSOR, Measurement
from .targets import TARGETS

NOTHING = "–"
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
    """Return the lines of each table; each scenario of several networks has one of its own."""
    made: dict[str, Iterable[str]] = {}
    others: list[Measurement] = []
    for scenario in dict.fromkeys(result.scenario for result in results):
        of_it = [result for result in results if result.scenario == scenario]
        if len(_networks(of_it)) > 1:
            made[scenario] = _table(_network_headings(of_it), _network_lines(of_it))
        else:
            others += of_it
    if others:
        made["server"] = _table(("what", "value"), server.items())
        made["rates"] = _table(RATE_HEADINGS, _rates(others))
        made["targets"] = _table(TARGET_HEADINGS, _targets(results))
    return made


def _targets(results: Sequence[Measurement]) -> Iterator[Sequence[str]]:
    for target in TARGETS:
        if found := target.verdict(results):
            figures = (f"{figure:.2f}" for figure in found)
            met = "met" if target.is_met(found[0]) else "**missed**"
            yield target.what, str(target), *figures, met


def _rates(results: Sequence[Measurement]) -> Iterator[Sequence[str]]:
    def key(result: Measurement) -> tuple[str, int, str]:
        return result.scenario, result.workers, result.name

    order = list(dict.fromkeys(map(key, results)))
    for (scenario, workers, name), group in groupby(
        sorted(results, key=lambda result: order.index(key(result))), key
    ):
        of_it = list(group)
        rates = [result.figures["rate"] for result in of_it]
        yield (
            *(scenario, name, str(workers), f"{of_it[0].rows:,}", f"{median(rates):,.0f}"),
            *(f"{min(rates):,.0f}", f"{max(rates):,.0f}"),
            _cell(of_it, PROCESSOR, ".3f"),
        )


def _table(headings: Sequence[str], lines: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(headings)} |"
    yield f"|{'---|' * len(headings)}"
    for line in lines:
        yield f"| {' | '.join(line)} |"


# --- what a network does to each contender: one line for each, one figure in each cell


def _network_headings(results: Sequence[Measurement]) -> Sequence[str]:
    rates = (f"rows/s, {network}" for network in _networks(results))
    return ["contender", "rows", "messages/row", *rates]


def _network_lines(results: Sequence[Measurement]) -> Iterator[Sequence[str]]:
    """Yield a line for each contender, and three with the delay that was measured."""
    networks = _networks(results)
    for name in dict.fromkeys(result.name for result in results):
        of_it = [result for result in results if result.name == name]
        yield (
            *(name, f"{of_it[0].rows:,}"),
            _cell(of_it, MESSAGES, ".3f"),
            *(_cell(_on(network, of_it), "rate", ",.0f") for network in networks),
        )
    for what, choose in (("median", median), ("lowest", min), ("highest", max)):
        delays = (_cell(_on(network, results), DELAY, ".2f", choose) for network in networks)
        yield f"measured delay, ms: {what}", "", "", *delays


def _networks(results: Sequence[Measurement]) -> Sequence[str]:
    return list(dict.fromkeys(result.network for result in results))


def _on(network: str, results: Sequence[Measurement]) -> Sequence[Measurement]:
    return [result for result in results if result.network == network]


def _cell(
    results: Sequence[Measurement],
    figure: str,
    form: str,
    choose: Callable[[Sequence[float]], float] = median,
) -> str:
    values = [result.figures[figure] for result in results if figure in result.figures]
    return format(choose(values), form) if values else NOTHING
