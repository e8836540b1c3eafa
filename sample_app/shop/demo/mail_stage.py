"""E-mails: TRANSACTIONAL, over one SMTP connection per worker."""

from __future__ import annotations

from sample_app.shop.demo.copies import run_copies
from sample_app.shop.demo.mail_audit import Before, audit
from sample_app.shop.demo.mailbox import Mailbox
from sample_app.shop.demo.screen import Screen
from sample_app.shop.processors import send_shipped_emails


def run(screen: Screen, copies: int) -> bool:
    """Race the workers, and compare the orders with the mails; True if all is well."""
    before = Before.look()
    screen.step("due", f"{len(before.due):,} shipped orders await their mail")
    with Mailbox() as mailbox:
        screen.step("mail", f"local server at {mailbox.url}")
        with screen.counting("mails", len(before.due), lambda: len(mailbox.mails)) as watch:
            shares = run_copies(
                send_shipped_emails.name,
                copies,
                watch=watch,
                environment={"EMAIL_URL": mailbox.url},
            )
    screen.shares(shares)
    screen.step("server", f"{len(mailbox.mails):,} mails in {mailbox.sessions:,} SMTP sessions")
    verdict = audit(before, mailbox.mails).verdict
    screen.verdict(verdict)
    return (
        verdict.clean
        and mailbox.sessions <= copies
        and all(share.exit_code == 0 for share in shares)
    )
