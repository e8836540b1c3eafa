"""Tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from rich.console import Console
from rich.table import Table

from .measuring import Measurement
from .targets import TARGETS, verdict


def print_server(console: Console, server: Mapping[str, str]) -> None:
    console.print("; ".join(f"{name}: {value}" for name, value in server.items()))


def print_results(console: Console, results: Sequence[Measurement]) -> None:
    """Print a table for each scenario, with medians, and ratios to its first line."""
    for scenario in dict.fromkeys(result.scenario for result in results):
        console.print(_scenario(scenario, [r for r in results if r.scenario == scenario]))


def _scenario(scenario: str, results: Sequence[Measurement]) -> Table:
    table = Table(title=scenario, title_justify="left")
    for heading in ("contender", "copies", "rows", "rows/s", "least–most", "ratio"):
        table.add_column(heading, justify="left" if heading == "contender" else "right")
    extra = [name for name in _figures(results) if name not in {"rate", "peak MB"}]
    if scenario == "backlog":
        extra.append("peak MB")
    for heading in extra:
        table.add_column(heading, justify="right")
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
            f"{min(rates):,.0f}–{max(rates):,.0f}",
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
    table = Table(title="targets", title_justify="left")
    for heading in ("what", "target", "measured", "least–most of the rounds", ""):
        table.add_column(heading)
    for target in TARGETS:
        found = verdict(target, results)
        if found is None:
            continue
        middle, least, most = found
        table.add_row(
            target.what,
            str(target),
            f"{middle:.2f}",
            f"{least:.2f}–{most:.2f}",
            "met" if target.is_met(middle) else "[bold]missed[/bold]",
        )
    if table.row_count:
        console.print(table)
