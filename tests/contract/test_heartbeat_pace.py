"""When leases are renewed, of which rows, and from when on they live."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import OperationalError, connection
from django.db.backends.signals import connection_created

from dcl_processor import Lease
from dcl_processor.engine import heartbeat, lane
from tests.contract.support import errands as the
from tests.contract.support.clocks import Clock
from tests.contract.support.heartbeat import held_beat, until, writes
from tests.contract.support.reports import assert_run
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

MINUTE = Lease(60)
#: No other number in a statement is one of these keys.
KEYS = (71_001, 71_002, 71_003)


class Pauses(list[float | None]):
    """What the heartbeat waits for; ``endless``: from now on until the end of the run."""

    endless = False


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> Pauses:
    """Note what the heartbeat waits for, and let it come at once."""
    noted = Pauses()

    class Soon(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            noted.append(timeout)
            return super().wait(60 if noted.endless else 0.01)

    monkeypatch.setattr(
        heartbeat, "threading", SimpleNamespace(**{**vars(threading), "Event": Soon})
    )
    return noted


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Let claims and heartbeats go by a clock that the test puts forward."""
    clock = Clock()
    monkeypatch.setattr(heartbeat, "time", clock)
    monkeypatch.setattr(lane, "time", clock)
    return clock


def test_leases_are_renewed_at_a_third_of_their_duration(pauses: list[float | None]) -> None:
    the.errands(1)
    report = the.at_least_once(lambda row: until(lambda: len(pauses) > 3), lease=MINUTE)()
    assert_run(report, processed=1)
    # A later beat may find the row locked by its settlement.
    assert set(pauses[:4]) == {20.0}


def test_a_renewal_that_failed_is_tried_again_after_a_twelfth(pauses: list[float | None]) -> None:
    the.errands(1)
    failed: list[Any] = []

    def fail_once(beating: Any) -> None:
        if not failed:
            failed.append(beating)
            raise OperationalError("no answer")

    with held_beat(lambda sql: True, first=fail_once) as beat:
        beat.go.set()
        report = the.at_least_once(lambda row: until(lambda: len(pauses) > 3), lease=MINUTE)()
    assert_run(report, processed=1)
    assert pauses[:3] == [20.0, 5.0, 20.0]


@contextmanager
def noted(pauses: list[float | None]) -> Iterator[list[tuple[int, str]]]:
    """Note the parameters of the heartbeats, each with the number of the pause before it."""
    said: list[tuple[int, str]] = []

    def wrapper(execute: Any, sql: str, params: Any, *args: Any) -> Any:
        said.append((len(pauses), repr(params)))
        return execute(sql, params, *args)

    def watch(connection: Any, **_: Any) -> None:
        if threading.current_thread().name.endswith(": leases"):
            connection.execute_wrappers.append(wrapper)

    connection_created.connect(watch)
    try:
        yield said
    finally:
        connection_created.disconnect(watch)


def test_rows_that_are_settled_are_renewed_no_more(pauses: list[float | None]) -> None:
    Errand.objects.bulk_create([Errand(pk=key, place=n) for n, key in enumerate(KEYS)])
    settled_before: list[int] = []

    def handle(row: Errand) -> None:
        if row.pk == KEYS[-1]:
            settled_before.append(len(pauses))
            until(lambda: len(pauses) > settled_before[0] + 3)

    with noted(pauses) as said:
        report = the.at_least_once(handle, lease=MINUTE, batch_size=3)()
    assert_run(report, processed=3)
    # One may have been under way while the second row was settled.
    after = [params for beat, params in said if beat > settled_before[0] + 1]
    assert any(str(KEYS[-1]) in params for params in after)
    assert not any(str(key) in params for params in after for key in KEYS[:-1])


def test_a_lease_lives_from_the_beginning_of_its_claim(time: Clock) -> None:
    """Its time is written by a statement that may take longer than the lease."""
    [row] = the.errands(1)
    calls: list[Any] = []

    def slowly(execute: Any, sql: str, *args: Any) -> Any:
        if sql.startswith("UPDATE") and not time.passed:
            time.passed = 61.0
        return execute(sql, *args)

    run = the.at_least_once(lambda row: calls.append(row.pk), lease=MINUTE)
    with connection.execute_wrapper(slowly):
        report = run()
    assert_run(report, lease_lost=1)
    assert calls == []
    assert the.untouched(row)


def test_a_lease_lives_from_the_beginning_of_its_renewal(time: Clock, pauses: Pauses) -> None:
    first, second = the.errands(2)
    calls: list[Any] = []

    with held_beat(writes) as beat:

        def handle(row: Errand) -> None:
            calls.append(row.pk)
            beat.await_it()
            time.passed = 61.0
            under_way = len(pauses)
            pauses.endless = True  # the next one would renew the lease again
            beat.go.set()
            until(lambda: len(pauses) > under_way)

        report = the.at_least_once(handle, lease=MINUTE, batch_size=2)()
    assert_run(report, processed=1, lease_lost=1)
    assert calls == [first.pk]
    assert the.untouched(second)
