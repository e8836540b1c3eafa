"""A row costs the command what it costs a call: the statements, and the messages of a wire."""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO

import pytest
from django.core.management import call_command

from dcl_processor.operator import registry
from tests.edge.manage import Install
from tests.test_counts import errands, parcels, per_row

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
    ("name", "make"),
    [("deliver", parcels), ("spanning", parcels), ("fetch", errands), ("bring", parcels)],
)
def test_a_row_costs_the_command_what_it_costs_a_call(
    install: Install, name: str, make: Callable[[int], None]
) -> None:
    install("counted", PROCESSORS)
    (processor,) = registry.get([f"counted.{name}"])

    def command(rows: int) -> None:
        out = StringIO()
        call_command("processors", "run", processor.name, stdout=out)
        assert f"counted.{name}: {rows} processed" in out.getvalue()

    def call(rows: int) -> None:
        assert processor().processed == rows

    cost = per_row(command, make, 20)
    assert cost == per_row(call, make, 20)
    assert cost.round_trips == 2
