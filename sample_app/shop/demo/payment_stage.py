"""Payments: AT_MOST_ONCE, with one worker killed in the middle of its charge."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

from sample_app.shop.demo.moods import scatter
from sample_app.shop.demo.payment_audit import audit
from sample_app.shop.demo.payment_stub import Mood, PaymentStub
from sample_app.shop.demo.rounds import come_back
from sample_app.shop.demo.screen import Screen
from sample_app.shop.demo.workers import Share, Watch, run_workers
from sample_app.shop.doubts import resolve_doubts
from sample_app.shop.payment_gateway import open_gateway
from sample_app.shop.processors import capture_payments

ONE_IN = {
    Mood.SLOW: 60,
    Mood.BUSY: 60,
    Mood.REFUSING: 300,
    Mood.CHARGED_IN_SILENCE: 2_000,
    Mood.LOST: 2_000,
}
LEAST_FOR_A_KILL = 30  # so that every worker is at work by then


def run(screen: Screen, workers: int) -> bool:
    """Race the workers, kill one, resolve its doubts; True if the audit is clean."""
    with PaymentStub({}) as empty:
        # Doubts of an interrupted demo, whose gateway no longer exists.
        _resolve(screen, empty)
    due = list(capture_payments.pending().order_by().values_list("order__number", flat=True))
    screen.step("due", f"{len(due):,} shipped orders are to be paid for")
    holding = len(due) // 3 if len(due) >= LEAST_FOR_A_KILL else None
    with PaymentStub(scatter(sorted(due), ONE_IN), holding=holding) as gateway:
        environment = {"PAYMENTS_URL": gateway.url}
        screen.step("gateway", f"local server at {gateway.url}: now slow, now busy, now silent")
        with screen.counting("charges", len(due), lambda: len(gateway.log)) as watch:
            shares = run_workers(
                capture_payments.name,
                workers,
                watch=_killing(screen, gateway, watch),
                environment=environment,
            )
        screen.shares(shares)
        _resolve(screen, gateway)
        later = come_back(screen, capture_payments, environment)
        _resolve(screen, gateway)
        verdict = audit(due, gateway.log)
    screen.verdict(verdict)
    return verdict.clean and _as_planned(shares, holding is not None) and _as_planned(later, False)


def _killing(screen: Screen, gateway: PaymentStub, watch: Watch) -> Watch:
    """Kill the worker whose charge the gateway holds, as soon as there is one."""

    def kill(pids: Sequence[int]) -> None:
        watch(pids)
        if (victim := gateway.held) in pids and victim is not None:
            os.kill(victim, signal.SIGKILL)
            gateway.let_go()
            screen.step("kill -9", f"process {victim}, while it waits for the gateway's answer")

    return kill


def _resolve(screen: Screen, gateway: PaymentStub) -> None:
    with open_gateway(gateway.url) as opened:
        # No worker is running, so that no row is too young to be in doubt.
        for answer in resolve_doubts(opened, older_than=0):
            found = (
                f"charged as {answer.charge_id}: marked done"
                if answer.charge_id
                else "never charged: due again"
            )
            screen.step("doubt", f"order {answer.order}, {answer.amount}: {found}")


def _as_planned(shares: Sequence[Share], kill: bool) -> bool:
    killed = sum(share.killed for share in shares)
    return killed == kill and all(share.killed or share.came_to_the_end for share in shares)
