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
from sample_app.shop.demo.audit import Before, audit
from sample_app.shop.demo.copies import run_copies
from sample_app.shop.demo.invented_orders import write_invented_orders
from sample_app.shop.demo.mailbox import Mailbox
from sample_app.shop.demo.screen import Screen
from sample_app.shop.loading import Loading
from sample_app.shop.orders_csv import OrderFileError
from sample_app.shop.processors import send_shipped_emails


class Command(BaseCommand):
    """Race copies of send_shipped_emails and count the mails that a real server took in."""

    help = (
        "Load orders, run several copies of shop.send_shipped_emails at once against a local "
        "SMTP server, and audit the mails it took in. Exits with 1 unless every due order got "
        "exactly one."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        """Take the order file and the number of copies."""
        parser.add_argument(
            "--orders", metavar="FILE.csv", default="", help="default: invented orders"
        )
        parser.add_argument("--copies", type=int, default=4, choices=range(1, 65), metavar="N")

    def handle(self, *_args: Any, orders: str, copies: int, **_options: Any) -> None:
        """Go through the stages; the exit code says whether the audit was clean."""
        screen = Screen()
        screen.title(
            f"{copies} cop{pluralize(copies, 'y,ies')} of {send_shipped_emails.name}, at once"
        )
        with told_plainly():
            call_command("migrate", verbosity=0)
            _load(screen, orders)
            if not _race(screen, copies):
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
    screen.step("orders", f"{loading} ({path.name})")


def _race(screen: Screen, copies: int) -> bool:
    before = Before.look()
    screen.step("due", f"{len(before.due):,} shipped orders await their mail")
    with Mailbox() as mailbox:
        screen.step("mail", f"local server at {mailbox.url}")
        with screen.delivering(len(before.due), lambda: len(mailbox.mails)) as watch:
            shares = run_copies(send_shipped_emails.name, copies, mailbox.url, watch=watch)
    verdict = audit(before, mailbox.mails)
    screen.shares(shares)
    screen.verdict(verdict)
    return verdict.clean and not any(share.exit_code for share in shares)
