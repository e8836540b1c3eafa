"""What the demo says: in colour and with a live bar on a terminal, in plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from sample_app.shop.demo.audit import Audit
from sample_app.shop.demo.copies import Share

NUMBERS_SHOWN = 5
COMPLAINT_LINES_SHOWN = 3  # the last ones: where a traceback has its point


class Screen:
    """One demo's output."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, soft_wrap=True)

    def title(self, text: str) -> None:
        """Say what is going on."""
        self._console.print(f"[bold]{text}[/bold]")

    def step(self, name: str, text: str) -> None:
        """Say that one stage is done, and what came of it."""
        self._console.print(f"  [cyan]{name:<8}[/cyan]", end="")
        self._console.print(text, markup=False)

    def warn(self, text: str) -> None:
        """Say what went wrong, without stopping."""
        self._console.print(text, style="yellow", markup=False)

    @contextmanager
    def delivering(self, due: int, delivered: Callable[[], int]) -> Iterator[Callable[[], None]]:
        """Show how many mails have come in; yield the function that brings the bar up to date."""
        progress = Progress(
            TextColumn("  mails"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        with progress:
            bar = progress.add_task("mails", total=due)
            yield lambda: progress.update(bar, completed=delivered())

    def shares(self, shares: Sequence[Share]) -> None:
        """Show who sent how many, and what each copy complained about."""
        table = Table(box=None, padding=(0, 3, 0, 0), pad_edge=False)
        for heading in ("  copy", "sent", "failed", "seconds"):
            table.add_column(heading, justify="right", style="default")
        for share in shares:
            table.add_row(
                str(share.copy), f"{share.sent:,}", str(share.failed), f"{share.seconds:.2f}"
            )
        self._console.print()
        self._console.print(table)
        self._console.print()
        for share in shares:
            if share.exit_code or share.complaint:
                self.warn(f"copy {share.copy} ended with exit code {share.exit_code}")
                for line in share.complaint.splitlines()[-COMPLAINT_LINES_SHOWN:]:
                    self.warn(f"  {line}")

    def verdict(self, audit: Audit) -> None:
        """Show the figures, the orders behind every bad one, and whether all is well."""
        for what, numbers in (
            ("no mail for order", audit.missing),
            ("mail for an order that was not due:", audit.not_due),
            ("unshipped, yet changed: order", audit.touched),
        ):
            if numbers:
                shown = ", ".join(map(str, numbers[:NUMBERS_SHOWN]))
                more = f" and {len(numbers) - NUMBERS_SHOWN:,} more"
                self.warn(f"{what} {shown}{more if len(numbers) > NUMBERS_SHOWN else ''}")
        if audit.still_due:
            self.warn(f"{audit.still_due:,} orders are still due: their flag was not flipped")
        self._console.print(
            f"{audit.due:,} due, {audit.delivered:,} mails delivered, "
            f"{audit.duplicates:,} duplicates, {len(audit.missing):,} missing; "
            f"{audit.unshipped - len(audit.touched):,} of {audit.unshipped:,} "
            "unshipped orders untouched",
            style="bold",
        )
        if audit.clean:
            self._console.print(_praise(audit), style="green")


def _praise(audit: Audit) -> str:
    if audit.due:
        return "All is well: one mail for every order that was due."
    return "All is well: nothing was due, and nothing was sent."
