"""Compares the mails that were really delivered with the orders that were due."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from sample_app.shop.demo.mailbox import DeliveredMail
from sample_app.shop.demo.verdict import Verdict, complaints
from sample_app.shop.models import Order

UnshippedRows = dict[int, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Before:
    """The database's state before the workers started."""

    due: frozenset[int]
    unshipped: UnshippedRows

    @classmethod
    def look(cls) -> Self:
        """Read the numbers of the orders due for a mail, and all columns of unshipped orders."""
        return cls(due=frozenset(_due()), unshipped=_unshipped())


@dataclass(frozen=True, slots=True)
class Audit:
    """The verdict; clean if every due order got one mail and nothing else changed."""

    due: int
    delivered: int
    duplicates: int
    twice: tuple[int | None, ...]
    missing: tuple[int, ...]
    not_due: tuple[int | None, ...]
    still_due: tuple[int, ...]
    unshipped: int
    touched: tuple[int, ...]

    @property
    def clean(self) -> bool:
        """True if there are no complaints."""
        return self.verdict.clean

    @property
    def verdict(self) -> Verdict:
        """The figures, and the orders behind every bad one."""
        return Verdict(
            figures=(
                f"{self.due:,} due, {self.delivered:,} mails delivered, "
                f"{self.duplicates:,} duplicates, {len(self.missing):,} missing; "
                f"{self.unshipped - len(self.touched):,} of {self.unshipped:,} "
                "unshipped orders untouched"
            ),
            complaints=complaints(
                ("more than one mail for order", self.twice),
                ("no mail for order", self.missing),
                ("mail for an order that was not due:", self.not_due),
                ("unshipped, yet changed: order", self.touched),
                ("still due, since its flag was not flipped: order", self.still_due),
            ),
            praise=(
                "All is well: one mail for every order that was due."
                if self.due
                else "All is well: nothing was due, and nothing was sent."
            ),
        )


def audit(before: Before, mails: Iterable[DeliveredMail]) -> Audit:
    """Return the audit of the mails and of the database as it is now."""
    mails_of = Counter(mail.order_number for mail in mails)
    after = _unshipped()
    return Audit(
        due=len(before.due),
        delivered=mails_of.total(),
        duplicates=mails_of.total() - len(mails_of),
        twice=tuple(number for number, mails in mails_of.items() if mails > 1),
        missing=tuple(sorted(before.due - mails_of.keys())),
        not_due=tuple(number for number in mails_of if number not in before.due),
        still_due=tuple(_due()),
        unshipped=len(before.unshipped),
        touched=tuple(
            number for number, row in before.unshipped.items() if after.get(number) != row
        ),
    )


def _due() -> list[int]:
    due = Order.objects.filter(shipped_at__isnull=False, shipped_email_sent=False)
    return list(due.order_by().values_list("number", flat=True))


def _unshipped() -> UnshippedRows:
    return {row["number"]: row for row in Order.objects.filter(shipped_at__isnull=True).values()}
