"""E-mails: TRANSACTIONAL, over one SMTP connection per worker."""

from __future__ import annotations

from sample_app.shop.demo.mail_audit import Before, audit
from sample_app.shop.demo.mailbox import Mailbox
from sample_app.shop.demo.screen import Screen
from sample_app.shop.demo.workers import run_workers
from sample_app.shop.processors import send_shipped_emails


def run(screen: Screen, workers: int) -> bool:
    """Race the workers, and compare the orders with the mails; True if all is well."""
    before = Before.look()
    screen.step("due", f"{len(before.due):,} shipped orders await their mail")
    with Mailbox() as mailbox:
        screen.step("mail", f"local server at {mailbox.url}")
        with screen.counting("mails", len(before.due), lambda: len(mailbox.mails)) as watch:
            shares = run_workers(
                send_shipped_emails.name,
                workers,
                watch=watch,
                environment={"EMAIL_URL": mailbox.url},
            )
    screen.shares(shares)
    screen.step("server", f"{len(mailbox.mails):,} mails in {mailbox.sessions:,} SMTP sessions")
    verdict = audit(before, mailbox.mails).verdict
    screen.verdict(verdict)
    return (
        verdict.clean
        and mailbox.sessions <= workers
        and all(share.exit_code == 0 for share in shares)
    )
