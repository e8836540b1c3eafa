"""What a network does to each contender: one line for each, one figure in each cell."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import median

from .measuring import COMMITS, DELAY, MESSAGES, Measurement

NOTHING = "–"


def is_about_networks(results: Sequence[Measurement]) -> bool:
    """Return whether the results of a scenario are of more than one network."""
    return len(_networks(results)) > 1


def headings(results: Sequence[Measurement]) -> Sequence[str]:
    rates = (f"rows/s, {network}" for network in _networks(results))
    return ["contender", "rows", "messages/row", "commits/row", *rates]


def lines(results: Sequence[Measurement]) -> Iterator[Sequence[str]]:
    """Yield a line for each contender, and three with the delay that was measured."""
    networks = _networks(results)
    for name in dict.fromkeys(result.name for result in results):
        of_it = [result for result in results if result.name == name]
        yield (
            *(name, f"{of_it[0].rows:,}"),
            *(_cell(of_it, figure, ".3f") for figure in (MESSAGES, COMMITS)),
            *(_cell(_on(network, of_it), "rate", ",.0f") for network in networks),
        )
    for what, choose in (("median", median), ("lowest", min), ("highest", max)):
        delays = (_cell(_on(network, results), DELAY, ".2f", choose) for network in networks)
        yield f"measured delay, ms: {what}", "", "", "", *delays


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
