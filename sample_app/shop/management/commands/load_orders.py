"""The command line of the loader: manage.py load_orders FILE.csv."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from sample_app.shop import catalogue
from sample_app.shop.database_errors import require_tables, told_plainly
from sample_app.shop.loading import Loading
from sample_app.shop.orders_csv import BadLine, OrderFileError


class Command(BaseCommand):
    """Load a file of orders; loading the same file twice does no harm."""

    help = (
        "Load orders from a CSV file. Bad lines are reported by number and skipped; "
        "orders already in the database are left alone."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        """Take the file, and whether to invent order lines."""
        parser.add_argument("file", type=Path, metavar="FILE.csv")
        parser.add_argument(
            "--invent-lines",
            action="store_true",
            help="give every new order one to three order lines, which the file does not name",
        )

    def handle(self, *_args: Any, file: Path, invent_lines: bool, **_options: Any) -> None:
        """Load the file, and print how many lines were loaded, already there or skipped."""
        loading = Loading(self._report, lines_of=catalogue.invent_lines if invent_lines else None)
        with told_plainly():
            require_tables()
            try:
                loading.load(file)
            except OrderFileError as error:
                raise CommandError(str(error)) from error
        self.stdout.write(f"Orders: {loading}")

    def _report(self, bad_line: BadLine) -> None:
        self.stderr.write(f"line {bad_line.line}: {bad_line.reason}; skipped")
