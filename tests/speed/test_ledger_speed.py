"""What the ledger costs: rows per second with handlers of 5 ms, with and without it.

In the processor time of this process, its threads included: how long a row takes depends on what
else runs.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
from django.test import override_settings

from dcl_processor import Breaker, batch_processor
from dcl_processor.ledger import ledger as process
from dcl_processor.ledger.models import RecordedRun
from tests.models import Parcel

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(600)]

ROUNDS, ROWS = 7, 300
HANDLER = 0.005

#: The part of the rows per second that may be lost.
MOST_LOST = 0.03

#: So often it is measured, because another program may run at the same time.
TRIES = 3


def send(row: Parcel) -> None:
    """Do nothing; what a handler waits for is added to what a row costs."""


def processor(**options: Any) -> Any:
    return batch_processor(
        pending=lambda: Parcel.objects.filter(sent=False), done={"sent": True}, **options
    )(send)


def rows_per_second(*, ledger: bool, **options: Any) -> float:
    Parcel.objects.all().delete()
    Parcel.objects.bulk_create([Parcel() for _ in range(ROWS)])
    run = processor(name="speed.send", **options)
    with override_settings(DCL_PROCESSOR_LEDGER=ledger):
        began = time.process_time()
        report = run()
        cost = (time.process_time() - began) / ROWS
    assert report.processed == ROWS
    return 1 / (HANDLER + cost)


@pytest.mark.parametrize("options", [{}, {"rate": 100_000, "breaker": Breaker(50)}])
def test_the_ledger_costs_at_most_three_percent_with_handlers_of_five_milliseconds(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best of each, in turns: what else the machine does only ever makes a run slower."""
    fresh = process.Ledger()
    monkeypatch.setattr(process, "_ledger", fresh)
    turns: list[tuple[float, float]] = []
    lost = 1.0
    for _ in range(TRIES):
        turns += [
            (rows_per_second(ledger=False), rows_per_second(ledger=True, **options))
            for _ in range(ROUNDS)
        ]
        without, with_it = map(max, zip(*turns, strict=True))
        lost = 1 - with_it / without
        print(f"{with_it:.1f} of {without:.1f} rows per second: {lost:.1%} lost")
        if lost <= MOST_LOST:
            break
    fresh.desk.close()
    assert RecordedRun.objects.count() == len(turns)
    assert lost <= MOST_LOST, turns
