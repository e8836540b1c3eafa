"""Invoices: TRANSACTIONAL, with the flag in a related row that the handler flips."""

from __future__ import annotations

from collections.abc import Collection

from django.db.models import Count

from sample_app.shop.demo.screen import Screen
from sample_app.shop.demo.verdict import Verdict, complaints
from sample_app.shop.demo.workers import run_workers
from sample_app.shop.models import Invoice
from sample_app.shop.processors import print_invoices


def run(screen: Screen, workers: int) -> bool:
    """Race the workers; True if each invoice was printed exactly once."""
    due = set(print_invoices.pending().order_by().values_list("number", flat=True))
    screen.step("due", f"{len(due):,} shipped orders have an invoice that is not printed")
    shares = run_workers(print_invoices.name, workers)
    screen.shares(shares)
    verdict = audit(due)
    screen.verdict(verdict)
    return verdict.clean and all(share.exit_code == 0 for share in shares)


def audit(due: Collection[int]) -> Verdict:
    """Judge the invoices of these orders, which were due before."""
    invoices = Invoice.objects.filter(order__number__in=due).annotate(times=Count("pages"))
    rows = list(invoices.values_list("order__number", "printed", "times"))
    once = [number for number, printed, times in rows if printed and times == 1]
    return Verdict(
        figures=f"{len(due):,} due, {len(once):,} printed exactly once",
        complaints=complaints(
            ("flagged, and not printed: order", [n for n, printed, t in rows if printed and not t]),
            ("not flagged: order", [n for n, printed, _ in rows if not printed]),
            ("printed more than once: order", [n for n, _, times in rows if times > 1]),
        ),
        praise=(
            "All is well: every invoice was printed exactly once."
            if due
            else "All is well: nothing was due, and nothing was printed."
        ),
    )
