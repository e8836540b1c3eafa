"""I4: what a held row does not hold up. PostgreSQL's own kind of lock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connection, connections, transaction

from dcl_processor import BatchProcessor, batch_processor
from tests import seams
from tests.contract.support.reports import assert_run
from tests.models import Depot, Parcel, Scan

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


@pytest.fixture(autouse=True)
def _others_wait_briefly() -> Iterator[None]:
    """Fail a session that would have to wait for our lock, and the test with it."""
    with connections["other"].cursor() as cursor:
        cursor.execute("SET lock_timeout = '500ms'")
    yield
    connections["other"].close()


@pytest.fixture
def parcel() -> Parcel:
    return Parcel.objects.create(depot=Depot.objects.create())


def processor(handler: Callable[[Parcel], Any]) -> BatchProcessor[Parcel]:
    pending = Parcel.objects.filter(sent=False, depot__open=True).select_related("depot")
    return batch_processor(pending=pending, done={"sent": True})(handler)


def update_another_row(row: Parcel) -> None:
    assert Parcel.objects.using("other").exclude(pk=row.pk).update(note="edited") == 1


def insert_a_child_and_commit(row: Parcel) -> None:
    # Django's foreign keys are checked at COMMIT: that is where a stronger lock would wait.
    with transaction.atomic(using="other"):
        Scan.objects.using("other").create(parcel_id=row.pk)


def update_the_joined_row(row: Parcel) -> None:
    assert row.depot is not None
    assert Depot.objects.using("other").filter(pk=row.depot.pk).update(name="renamed") == 1


def read_the_row(row: Parcel) -> None:
    assert Parcel.objects.using("other").get(pk=row.pk).sent is False


OTHERS = [update_another_row, insert_a_child_and_commit, update_the_joined_row, read_the_row]


@pytest.mark.parametrize("in_messages", [True, False])
@pytest.mark.parametrize("other", OTHERS, ids=lambda other: other.__name__)
def test_i4_others_go_through_while_a_row_is_handled(
    other: Callable[[Parcel], None],
    parcel: Parcel,
    in_messages: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not in_messages:
        seams.replace(monkeypatch, seams.SUITS, lambda *_: False)
    Parcel.objects.create(sent=True)
    processor(other)().raise_for_failures()
    assert Parcel.objects.filter(sent=True).count() == 2


def test_i4_an_uncommitted_child_does_not_hide_its_parent(parcel: Parcel) -> None:
    with transaction.atomic(using="other"):
        with connections["other"].cursor() as cursor:
            # Checked at once, the foreign key locks its parent until the child is committed.
            cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")
        Scan.objects.using("other").create(parcel_id=parcel.pk)
        assert_run(processor(lambda row: None)(wait_for_locked=0), processed=1)


def test_i1_empty_takes_no_lock_and_opens_no_transaction() -> None:
    Parcel.objects.create(sent=True)
    connection.ensure_connection()
    mine = connection.connection.info.backend_pid
    looks: list[tuple[str, int]] = []

    def look(execute: Callable[..., Any], sql: str, *args: Any) -> Any:
        result = execute(sql, *args)
        with connections["other"].cursor() as cursor:
            cursor.execute(
                "SELECT state, (SELECT count(*) FROM pg_locks WHERE pid = %s)"
                " FROM pg_stat_activity WHERE pid = %s",
                [mine, mine],
            )
            looks.append(cursor.fetchone())
        return result

    with connection.execute_wrapper(look):
        assert_run(processor(lambda row: None)())
    assert looks == [("idle", 0)]
