"""Carts: TRANSACTIONAL and only in the database, a hundred per transaction."""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta
from random import Random

from django.db.models import Count, F, Q, QuerySet, Sum
from django.utils import timezone

from sample_app.shop.demo.screen import Screen
from sample_app.shop.demo.verdict import Verdict, complaints
from sample_app.shop.demo.workers import run_workers
from sample_app.shop.models import Cart, Customer
from sample_app.shop.processors import CART_KEPT, expire_carts

FORGOTTEN, FRESH = 2_000, 100


def run(screen: Screen, workers: int) -> bool:
    """Fill some carts, race the workers; True if each forgotten cart expired exactly once."""
    invent_carts()
    due = set(expire_carts.pending().order_by().values_list("pk", flat=True))
    fresh = set(Cart.objects.filter(expired=False).values_list("pk", flat=True)) - due
    screen.step("due", f"{len(due):,} carts are forgotten, {len(fresh):,} are not")
    # Twenty batches are done before four processes have started.
    shares = run_workers(expire_carts.name, (workers + 1) // 2)
    screen.shares(shares)
    verdict = audit(due, fresh)
    screen.verdict(verdict)
    return verdict.clean and all(share.exit_code == 0 for share in shares)


def invent_carts() -> None:
    """Fill carts of existing customers: most of the carts forgotten, some not."""
    customers = list(Customer.objects.values_list("pk", flat=True))
    now, chance = timezone.now(), Random(1)  # noqa: S311 - nothing here is a secret
    ages = [CART_KEPT + timedelta(days=1)] * FORGOTTEN + [timedelta(days=1)] * FRESH
    Cart.objects.bulk_create(
        Cart(
            customer_id=chance.choice(customers), pieces=chance.randint(1, 20), touched_at=now - age
        )
        for age in ages
        if customers
    )


def audit(due: Collection[int], fresh: Collection[int]) -> Verdict:
    """Judge the outcome for the carts that were forgotten before, and for the others."""
    carts = Cart.objects.annotate(times=Count("returns"), returned=Sum("returns__pieces"))
    forgotten = carts.filter(pk__in=due)
    once = forgotten.filter(expired=True, times=1, returned=F("pieces"))
    touched = carts.filter(Q(expired=True) | Q(times__gt=0), pk__in=fresh)
    return Verdict(
        figures=(
            f"{len(due):,} due, {once.count():,} expired exactly once; "
            f"{len(fresh) - touched.count():,} of {len(fresh):,} fresh carts untouched"
        ),
        complaints=complaints(
            ("not expired: cart", _keys(forgotten.filter(expired=False))),
            ("expired, and nothing is back on the shelf: cart", _keys(forgotten.filter(times=0))),
            ("back on the shelf more than once: cart", _keys(forgotten.filter(times__gt=1))),
            (
                "not as much back on the shelf as there was in cart",
                _keys(forgotten.filter(times=1).exclude(returned=F("pieces"))),
            ),
            ("fresh, yet expired: cart", _keys(touched)),
        ),
        praise="All is well: every forgotten cart expired exactly once.",
    )


def _keys(carts: QuerySet[Cart]) -> list[int]:
    return list(carts.order_by("pk").values_list("pk", flat=True))
