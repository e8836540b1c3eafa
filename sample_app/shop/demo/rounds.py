"""Repeats runs for rows that failed, as cron does, until no row is left to be tried."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from django.db.models import Min
from django.utils import timezone

from dcl_processor import BatchProcessor
from sample_app.shop.demo.screen import Screen
from sample_app.shop.demo.workers import Share, run_workers

MOST_ROUNDS = 8
LONGEST_WAIT = 5.0  # seconds


def come_back(
    screen: Screen,
    processor: BatchProcessor[Any],
    environment: Mapping[str, str],
    *,
    options: Sequence[str] = (),
) -> list[Share]:
    """Run one worker whenever the next row is due, and return what the workers did."""
    shares: list[Share] = []
    while len(shares) < MOST_ROUNDS and (left := processor.pending().count()):
        wait = _seconds_until_due(processor)
        screen.step("retry", f"{left:,} to be tried again, the first in {wait:.1f} s")
        time.sleep(wait)
        share = run_workers(processor.name, 1, options=options, environment=environment)
        screen.shares(share)
        shares += share
    return shares


def _seconds_until_due(processor: BatchProcessor[Any]) -> float:
    first = processor.pending().aggregate(first=Min("next_attempt_at"))["first"]
    seconds = (first - timezone.now()).total_seconds() if first else 0.0
    return min(max(0.0, seconds), LONGEST_WAIT)
