"""What PostgreSQL's timeouts do to a row, under each delivery."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from django.db import connection, connections, transaction

from tests.contract.support import errands as the
from tests.contract.support.reports import assert_run
from tests.contract.support.sessions import connected
from tests.models import Errand
from tests.waiting import until

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

SHORT = "200ms"
SLOW = 0.5  # seconds

EACH = pytest.mark.parametrize(
    "make", [the.transactional, the.at_most_once, the.at_least_once], ids=lambda make: make.__name__
)


@contextmanager
def limited(setting: str) -> Iterator[None]:
    """Have the block's statements limited, and not those around it, as a machine may stop there."""
    with connection.cursor() as cursor:
        cursor.execute(f"SET {setting} = '{SHORT}'")
    try:
        yield
    finally:
        if not connection.in_atomic_block:  # with a transaction that is lost, it is lost as well
            with connection.cursor() as cursor:
                cursor.execute(f"SET {setting} = 0")


def has_gone(session: int) -> bool:
    with connections["other"].cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE pid = %s", [session])
        return bool(cursor.fetchone()[0] == 0)


def two_rows() -> tuple[Errand, Errand]:
    first, second = Errand.objects.bulk_create([Errand(place=1), Errand(place=0)])
    return first, second


def done() -> list[int]:
    rows = Errand.objects.using("other").filter(done=True)
    return sorted(rows.values_list("place", flat=True))


@pytest.mark.parametrize("setting", ["idle_in_transaction_session_timeout", "transaction_timeout"])
@EACH
def test_a_session_that_is_ended_costs_only_a_row_whose_transaction_was_open(
    make: the.Make, setting: str
) -> None:
    two_rows()
    calls: list[int] = []
    lost = make is the.transactional

    def handle(row: Errand) -> None:
        calls.append(row.place)
        if calls != [1]:
            return
        own = connection.connection.info.backend_pid
        with limited(setting):
            if lost:
                until(lambda: has_gone(own), "the session's end")
            else:
                time.sleep(SLOW)
        assert has_gone(own) == lost

    report = make(handle)()
    assert_run(report, processed=2 - lost, failed=int(lost))
    assert done() == ([0] if lost else [0, 1])
    assert_run(make(handle)(), processed=int(lost))
    # The effect is repeated for the row that was lost.
    assert calls == ([1, 0, 1] if lost else [1, 0])


@EACH
def test_a_lock_that_the_handler_waits_for_too_long_is_the_failure_of_its_row(
    make: the.Make,
) -> None:
    two_rows()
    (own,) = Errand.objects.bulk_create([Errand(done=True, place=7)])

    def handle(row: Errand) -> None:
        if row.place:
            Errand.objects.filter(pk=own.pk).update(result="seen")

    with transaction.atomic(using="other"):
        Errand.objects.using("other").select_for_update().get(pk=own.pk)
        with connected({"options": f"-c lock_timeout={SHORT}"}):
            report = make(handle)()
    assert_run(report, processed=1, failed=1)
    assert "lock timeout" in str(report.failures[0].error)
    assert done() == [0, 7]
    assert not connections["other"].in_atomic_block
