"""A connection of the driver behind a proxy, as tracers and connection pools put it there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import wrapt
from django.db import connection
from django.db.models import F

from dcl_processor import Retry
from tests.contract.support import errands as the
from tests.contract.support.reports import assert_run
from tests.models import Errand, Parcel

pytestmark = pytest.mark.django_db(transaction=True)


RETRYING: Any = {
    "retry": Retry(max_attempts=2, backoff=60),
    "failed": {"dead": True},
    "reset": {"claimed": False},
}


@pytest.fixture(autouse=True)
def _proxied(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put each new connection behind an object whose class has none of the driver's methods."""
    module: Any = connection.Database  # type: ignore[attr-defined]  # of each backend
    connect = module.connect
    monkeypatch.setattr(module, "connect", lambda *a, **k: wrapt.ObjectProxy(connect(*a, **k)))
    connection.close()
    connection.ensure_connection()
    assert type(connection.connection) is wrapt.ObjectProxy
    yield
    connection.close()


@the.all_deliveries
@pytest.mark.parametrize("batch_size", [1, 3])
def test_each_row_is_handled_once(make: the.Make, batch_size: int) -> None:
    the.errands(7)
    parcel = Parcel.objects.create()
    handled: list[int] = []

    def handle(row: Errand) -> None:
        handled.append(row.place)
        Parcel.objects.update(priority=F("priority") + 1)

    driver: Any = connection.connection.__wrapped__
    before = dict(getattr(driver, "__dict__", {}))
    run = make(handle, batch_size=batch_size, **RETRYING)
    for rows in (7, 0, 0):
        assert_run(run(), processed=rows)
    assert sorted(handled) == [*range(7)]
    parcel.refresh_from_db()
    assert parcel.priority == 7
    kept = Errand.objects.filter(done=True, dead=False, attempts=0, leased_until=None)
    assert kept.count() == 7
    assert connection.connection.__wrapped__ is driver
    assert getattr(driver, "__dict__", {}) == before  # it is only read


@the.all_deliveries
@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_row_that_raises_fails_alone(make: the.Make, batch_size: int) -> None:
    rows = the.errands(4)
    Parcel.objects.create(note="")

    def handle(row: Errand) -> None:
        if row.place == 1:
            Parcel.objects.update(note="worked")
            raise ValueError("the handler's own")

    report = make(handle, batch_size=batch_size, **RETRYING)()
    assert_run(report, processed=3, failed=1, to_retry=1)
    assert [(each.pk, str(each.error)) for each in report.failures] == [
        (rows[1].pk, "the handler's own")
    ]
    assert the.places(done=True) == [0, 2, 3]
    assert the.places(done=False, dead=False, attempts=1) == [1]
    is_rolled_back = make is the.transactional
    assert Parcel.objects.get().note == ("" if is_rolled_back else "worked")
