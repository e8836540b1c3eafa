"""What metrics and traces cost, beside handlers that wait for a service."""

from __future__ import annotations

import time

import pytest

from dcl_processor.metrics.collector import Collector
from tests.contract.support import errands as the
from tests.contract.support.onlookers import exporting, looking_on
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True)

#: What metrics and traces together may cost, as a part of what a row costs without them. The part
#: of the rows per second, where each handler waits for 5 ms, depends on the machine as well.
MOST_SHARE, HANDLER = 0.75, 0.005


def test_metrics_and_traces_cost_at_most_three_quarters_of_a_row() -> None:
    """In the processor time of the run's thread, because a row's time depends on what else runs.

    While a handler waits for its service, the exporters' own threads cost no row.
    """
    rows = 200

    def cost() -> float:
        Errand.objects.all().delete()
        the.errands(rows)
        processor = the.transactional(lambda row: None, pending_since="claimed_at")
        began = time.thread_time()
        assert processor.run().processed == rows
        return (time.thread_time() - began) / rows

    def cost_with() -> float:
        with looking_on(Collector()), exporting():
            return cost()

    cost()
    pairs = [(cost(), cost_with()) for _ in range(8)]
    off, on = (min(each) for each in zip(*pairs, strict=True))
    lost = 1 - (HANDLER + off) / (HANDLER + on)
    print(f"{(on - off) * 1e6:.0f} µs on {off * 1e6:.0f} µs a row: {lost:.1%} lost beside 5 ms")
    assert (on - off) / off <= MOST_SHARE, pairs
