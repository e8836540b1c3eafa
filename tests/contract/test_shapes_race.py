"""I2 for every shape, without a schedule: two copies, and whatever happens between them.

The forced interleavings say why there is no double; this looks for one that no author thought of.
"""

from __future__ import annotations

from collections import Counter
from threading import Barrier, Thread
from typing import Any

import pytest
from django.db import connections

from dcl_processor import Report
from dcl_processor.candidates import scan
from tests.contract.support.expression_shapes import EXPRESSIONS
from tests.contract.support.gate import PATIENCE
from tests.contract.support.own_shapes import OWN
from tests.contract.support.shapes import Shape
from tests.contract.support.spanning_shapes import SPANNING
from tests.contract.test_shapes import is_pending, processor

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

COPIES, ROWS = 2, 10


@pytest.mark.parametrize("shape", [*OWN, *SPANNING, *EXPRESSIONS], ids=str)
def test_i2_copies_that_race_handle_each_row_once(
    shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "WINDOW", 4)
    rows = [shape.make() for _ in range(ROWS)]
    start = Barrier(COPIES)
    calls: list[Any] = []
    reports: list[Report] = []

    def copy() -> None:
        send = processor(shape, calls)
        try:
            start.wait(PATIENCE)
            reports.append(send(filter=shape.filter, wait_for_locked=PATIENCE))
        finally:
            connections.close_all()

    threads = [Thread(target=copy) for _ in range(COPIES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE)
    assert not any(thread.is_alive() for thread in threads)
    assert Counter(row.pk for row in calls) == Counter(row.pk for row in rows)
    assert sum(report.processed for report in reports) == ROWS
    assert [report.failures for report in reports] == [()] * COPIES
    assert not any(is_pending(shape, row) for row in rows)
