"""The command line of the demo: manage.py demo [--orders FILE.csv]."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.template.defaultfilters import pluralize

from sample_app.shop.catalogue import invent_lines
from sample_app.shop.database_errors import told_plainly
from sample_app.shop.demo import mail_stage, payment_stage, warehouse_stage
from sample_app.shop.demo.invented_orders import write_invented_orders
from sample_app.shop.demo.screen import Screen
from sample_app.shop.loading import Loading
from sample_app.shop.models import Order
from sample_app.shop.orders_csv import OrderFileError
from sample_app.shop.paperwork import add_paperwork
from sample_app.shop.processors import capture_payments, push_to_warehouse, send_shipped_emails

STAGES = (
    (send_shipped_emails, "one mail for each order", mail_stage.run),
    (capture_payments, "no card charged twice, come what may", payment_stage.run),
    (push_to_warehouse, "every order arrives, some more than once", warehouse_stage.run),
)


class Command(BaseCommand):
    """Race workers of the shop's processors, and audit what each processor promises."""

    help = (
        "Load orders, run several workers of each of the shop's processors at once against local "
        "servers, and audit the results: mails, charges, and orders in the warehouse. Exits with 1 "
        "unless every audit is clean."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        """Take the order file and the number of workers."""
        parser.add_argument(
            "--orders", metavar="FILE.csv", default="", help="default: invented orders"
        )
        parser.add_argument("--workers", type=int, default=4, choices=range(1, 65), metavar="N")

    def handle(self, *_args: Any, orders: str, workers: int, **_options: Any) -> None:
        """Go through the stages; the exit code shows whether the audit was clean."""
        screen = Screen()
        with told_plainly():
            call_command("migrate", verbosity=0)
            _load(screen, orders)
            screen.step(
                "workers", f"{workers} process{pluralize(workers, 'es')}, all started at once"
            )
            clean = []
            for processor, promise, run in STAGES:
                screen.title(f"{processor.name}: {promise}")
                clean.append(run(screen, workers))
        if not all(clean):
            raise SystemExit(1)


def _load(screen: Screen, orders: str) -> None:
    loading = Loading(
        lambda bad: screen.warn(f"  line {bad.line}: {bad.reason}; skipped"), lines_of=invent_lines
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(orders or Path(folder, "invented_orders.csv"))
        if not orders:
            write_invented_orders(path)
        try:
            loading.load(path)
        except OrderFileError as error:
            raise CommandError(str(error)) from error
    # Orders that were loaded before the shop had paperwork have none.
    add_paperwork(Order.objects.all())
    screen.title("The shop")
    screen.step("orders", f"{loading} ({path.name})")
