"""SVG drawings of what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from .measuring import Measurement

OURS, OTHERS, BARE = "#1f6f43", "#b0562c", "#7a7f87"
TICKS = (1, 3, 10, 30, 100, 300, 1_000, 3_000)
BARS = {
    "one-by-one": "One commit for each row, one worker, a handler that does nothing",
    "batches": "Many rows for each commit, one worker, a handler that does nothing",
    "queues": "One commit or more for each row, against queues in a table",
}


def draw(results: Sequence[Measurement], folder: Path) -> None:
    """Draw what there are results for."""
    # The same figures make the same file, byte for byte.
    mpl.rcParams.update({"svg.hashsalt": "dcl", "svg.fonttype": "none", "font.size": 9})
    for scenario in dict.fromkeys(result.scenario for result in results):
        of_it = [result for result in results if result.scenario == scenario]
        if scenario in BARS:
            _save(_bars(of_it, BARS[scenario]), folder, scenario)
        elif scenario == "workers":
            _save(_lines(of_it), folder, scenario)


def _save(figure: Any, folder: Path, name: str) -> None:
    path = folder / f"benchmark-{name}.svg"
    figure.savefig(path, metadata={"Date": None, "Creator": None}, bbox_inches="tight")
    # Matplotlib leaves blanks at the ends of lines.
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")


def _bars(results: Sequence[Measurement], title: str) -> Any:
    names = list(dict.fromkeys(result.name for result in results))
    rates = [median(r.figures["rate"] for r in results if r.name == name) for name in names]
    spread: list[list[float]] = [[], []]
    for name, rate in zip(names, rates, strict=True):
        of_it = [r.figures["rate"] for r in results if r.name == name]
        spread[0].append(rate - min(of_it))
        spread[1].append(max(of_it) - rate)
    figure = Figure(figsize=(7.2, 0.6 + 0.34 * len(names)))
    axes = figure.subplots()
    colours = [_colour(name) for name in names]
    axes.barh(names, rates, xerr=spread, color=colours, ecolor="#444444", capsize=2, height=0.65)
    axes.invert_yaxis()
    axes.set_xlabel("rows per second: the median, and the least and the greatest of the rounds")
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _lines(results: Sequence[Measurement]) -> Any:
    figure = Figure(figsize=(7.2, 3.4))
    axes = figure.subplots()
    for name in dict.fromkeys(result.name for result in results):
        of_it = [result for result in results if result.name == name]
        workers = sorted({result.workers for result in of_it})
        rates = [median(r.figures["rate"] for r in of_it if r.workers == n) for n in workers]
        axes.plot(workers, rates, marker="o", color=_colour(name), label=name)
        for n, rate in zip(workers, rates, strict=True):
            place = {"textcoords": "offset points", "xytext": (4, 6)}
            axes.annotate(f"{rate:,.0f}", (n, rate), fontsize=8, **place)
    workers = sorted({result.workers for result in results})
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(workers, [str(n) for n in workers])
    rates = [result.figures["rate"] for result in results]
    ticks = [n for n in TICKS if min(rates) / 2 < n < max(rates) * 2]
    axes.set_yticks(ticks, [f"{n:,}" for n in ticks])
    axes.minorticks_off()
    axes.set_xlabel("workers, each a process")
    axes.set_ylabel("rows per second")
    axes.set_title("Racing workers, a handler that takes 5 ms", loc="left", fontsize=10)
    axes.legend(frameon=False, loc="lower left")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _colour(name: str) -> str:
    if name.startswith(("transactional", "at most once", "at least once")):
        return OURS
    return BARE if name.startswith(("raw", "pgbench")) else OTHERS
