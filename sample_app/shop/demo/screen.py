"""The demo's output: in colour and with a live bar on a terminal, in plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sample_app.shop.demo.verdict import Verdict
from sample_app.shop.demo.workers import Share, Watch

COMPLAINT_LINES_SHOWN = 3  # the last ones, because a traceback ends with the error


class Screen:
    """One demo's output."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, soft_wrap=True)

    def title(self, text: str) -> None:
        """Print what happens next."""
        self._console.print(f"\n[bold]{text}[/bold]")

    def step(self, name: str, text: str) -> None:
        """Print that one step is done, and its result."""
        self._console.print(f"  [cyan]{name:<8}[/cyan]", end="")
        self._console.print(text, markup=False)

    def warn(self, text: str) -> None:
        """Print what went wrong, without stopping."""
        self._console.print(text, style="yellow", markup=False)

    @contextmanager
    def counting(self, what: str, due: int, done: Callable[[], int]) -> Iterator[Watch]:
        """Show how many of the due rows are done; yield the function that updates the bar."""
        progress = Progress(
            TextColumn(f"  {what:<8}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        with progress:
            bar = progress.add_task(what, total=due)
            yield lambda _: progress.update(bar, completed=done())

    def shares(self, shares: Sequence[Share]) -> None:
        """Show how many rows each worker did, and the complaints of workers that did not finish."""
        rows = " + ".join("killed" if share.killed else f"{share.processed:,}" for share in shares)
        seconds = max(share.seconds for share in shares)
        failed = sum(share.failed for share in shares)
        noun = "workers" if len(shares) > 1 else "worker"
        text = f"{rows} rows in {seconds:.2f} s{f', {failed:,} failed' if failed else ''}"
        self.step(noun, text)
        for share in shares:
            if not share.came_to_the_end and not share.killed:
                self.warn(f"worker {share.worker} ended with exit code {share.exit_code}")
                for line in share.complaint.splitlines()[-COMPLAINT_LINES_SHOWN:]:
                    self.warn(f"  {line}")

    def verdict(self, verdict: Verdict) -> None:
        """Show the figures, and all complaints, or that there are none."""
        for complaint in verdict.complaints:
            self.warn(complaint)
        self._console.print(verdict.figures, style="bold", markup=False)
        if verdict.clean:
            self._console.print(verdict.praise, style="green", markup=False)
