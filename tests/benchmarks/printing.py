"""Tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from rich.console import Console
from rich.table import Table

from . import network_table
from .measuring import Measurement
from .targets import TARGETS, verdict


def print_server(console: Console, server: Mapping[str, str]) -> None:
    console.print("; ".join(f"{name}: {value}" for name, value in server.items()))


def print_results(console: Console, results: Sequence[Measurement]) -> None:
    """Print a table for each scenario, with medians, and ratios to its first line."""
    for scenario in dict.fromkeys(result.scenario for result in results):
        of_it = [result for result in results if result.scenario == scenario]
        draw = _networks if network_table.is_about_networks(of_it) else _scenario
        console.print(draw(scenario, of_it))


def _networks(scenario: str, results: Sequence[Measurement]) -> Table:
    first, *others = network_table.headings(results)
    table = _table(scenario, (first,), others)
    for line in network_table.lines(results):
        table.add_row(*line)
    return table


def _table(title: str, words: Sequence[str], figures: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in words:
        table.add_column(heading)
    for heading in figures:
        table.add_column(heading, justify="right")
    return table


def _scenario(scenario: str, results: Sequence[Measurement]) -> Table:
    extra = [name for name in _figures(results) if name not in {"rate", "peak MB"}]
    if scenario == "backlog":
        extra.append("peak MB")
    headings = ("workers", "rows", "rows/s", "lowest", "highest", "ratio", *extra)
    table = _table(scenario, ("contender",), headings)
    first: dict[int, list[float]] = {}
    for name, copies in dict.fromkeys((r.name, r.copies) for r in results):
        of_it = [r for r in results if (r.name, r.copies) == (name, copies)]
        rates = [r.figures["rate"] for r in of_it]
        base = first.setdefault(copies, rates)
        table.add_row(
            name,
            str(copies),
            f"{of_it[0].rows:,}",
            f"{median(rates):,.0f}",
            f"{min(rates):,.0f}",
            f"{max(rates):,.0f}",
            f"{median(a / b for a, b in zip(rates, base, strict=False)):.2f}",
            *(_cell(of_it, figure) for figure in extra),
        )
    return table


def _figures(results: Sequence[Measurement]) -> list[str]:
    return list(dict.fromkeys(name for result in results for name in result.figures))


def _cell(results: Sequence[Measurement], figure: str) -> str:
    values = [r.figures[figure] for r in results if figure in r.figures]
    return f"{median(values):.3g}" if values else ""


def print_targets(console: Console, results: Sequence[Measurement]) -> None:
    """Print what was claimed beside what was measured."""
    table = _table("targets", ("what", "target"), ("measured", "lowest", "highest", ""))
    for target in TARGETS:
        found = verdict(target, results)
        if found is None:
            continue
        middle, least, most = found
        table.add_row(
            target.what,
            str(target),
            f"{middle:.2f}",
            f"{least:.2f}",
            f"{most:.2f}",
            "met" if target.is_met(middle) else "[bold]missed[/bold]",
        )
    if table.row_count:
        console.print(table)
