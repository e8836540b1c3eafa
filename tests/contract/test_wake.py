"""wake() is a hint where the database can notify, and nothing at all where it cannot."""

from __future__ import annotations

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from dcl_processor import batch_processor
from dcl_processor.watch import notify
from tests.models import Parcel

pytestmark = pytest.mark.django_db(transaction=True)


@batch_processor(pending=lambda: Parcel.objects.filter(sent=False), done={"sent": True})
def send(parcel: Parcel) -> None:
    """Pretend."""


def test_wake_costs_a_statement_only_where_somebody_can_hear_it() -> None:
    notify._notified.clear()
    with CaptureQueriesContext(connection) as queries:
        send.wake()
    assert len(queries) == (1 if connection.vendor == "postgresql" else 0)
