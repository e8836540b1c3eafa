"""A row costs the command the messages that it costs a call, which is what the pages promise."""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO

import pytest
from django.core.management import call_command

from tests.edge.manage import Install
from tests.test_counts import Cost, errands, parcels, per_row

pytestmark = pytest.mark.django_db(transaction=True)

PROCESSORS = """
from dcl_processor import Delivery, Lease
from tests.test_counts import CLAIM, SPANNING, outside, transactional

deliver = transactional(name="counted.deliver")
spanning = transactional(name="counted.spanning", pending=SPANNING)
fetch = outside(name="counted.fetch", delivery=Delivery.AT_MOST_ONCE, **CLAIM)
bring = transactional(name="counted.bring", delivery=Delivery.AT_LEAST_ONCE, lease=Lease(60))
"""


@pytest.mark.parametrize(
    ("name", "make", "expected"),
    [
        ("deliver", parcels, Cost(2, 2, 1)),
        ("spanning", parcels, Cost(3, 2, 1)),
        ("fetch", errands, Cost(2, 2, 2)),
        ("bring", parcels, Cost(2, 2, 2)),
    ],
)
def test_what_a_row_costs_the_command(
    install: Install, name: str, make: Callable[[int], None], expected: Cost
) -> None:
    install("counted", PROCESSORS)

    def run(rows: int) -> None:
        out = StringIO()
        call_command("processors", "run", f"counted.{name}", stdout=out)
        assert f"counted.{name}: {rows} processed" in out.getvalue()

    assert per_row(run, make, 20) == expected
