"""The savepoint of a row, which the first statement of its handler opens."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from django.db import DatabaseError, connection, transaction

from dcl_processor import Retry
from tests.contract.support import errands as the
from tests.contract.support.parcels import (
    in_batches,
    note,
    parcels,
    savepoints,
    sent,
    statements,
    worked,
)
from tests.contract.support.reports import assert_run
from tests.models import Errand, Parcel, Scan

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


def ask(row: Parcel) -> None:
    note(row)
    transaction.set_rollback(True)


def ask_first(row: Parcel) -> None:
    transaction.set_rollback(True)
    with pytest.raises(DatabaseError):
        note(row)


def leave_marked(row: Parcel) -> None:
    note(row)
    with suppress(ValueError), transaction.atomic(savepoint=False):
        int("inside")


@pytest.mark.parametrize("spoil", [ask, ask_first, leave_marked])
def test_i7_a_rollback_takes_back_the_row_that_asked_for_it(
    spoil: Callable[[Parcel], None],
) -> None:
    parcels(3)
    calls: list[int] = []

    def handle(row: Parcel) -> None:
        calls.append(row.priority)
        (spoil if row.priority == 1 else note)(row)

    report = in_batches(handle)()
    assert_run(report, processed=2, failed=1)
    assert sent() == worked() == [0, 2]
    assert "marked the transaction for rollback" in str(report.failures[0].error)
    if spoil is not ask_first:
        assert calls == [0, 1, 2]  # the others' work is kept, and not redone


def test_i7_a_nested_atomic_block_is_rolled_back_alone() -> None:
    parcels(3)

    def handle(row: Parcel) -> None:
        note(row)
        try:
            with transaction.atomic():
                Scan.objects.create(parcel=row)
                if row.priority == 1:
                    int("inside")
        except ValueError:
            pass

    assert_run(in_batches(handle)(), processed=3)
    assert sent() == worked() == [0, 1, 2]
    assert sorted(Scan.objects.values_list("parcel__priority", flat=True)) == [0, 2]


def old_cursor() -> Callable[[Parcel], Any]:
    cursor = connection.connection.cursor()
    return lambda row: cursor.execute(f"{WRITE} WHERE id = {row.pk}")


def the_connection() -> Callable[[Parcel], Any]:
    return lambda row: connection.connection.execute(f"{WRITE} WHERE id = {row.pk}")


def copy() -> Callable[[Parcel], Any]:
    cursor = connection.connection.cursor()

    def write(row: Parcel) -> None:
        with cursor.copy("COPY tests_tag (name) FROM STDIN") as copying:
            copying.write_row([str(row.pk)])
        connection.connection.execute(f"{WRITE} WHERE id = {row.pk}")

    return write


WRITE = "UPDATE tests_parcel SET note = 'worked'"  # whose one parameter is a number of our own
PAST_DJANGO = {"a cursor older than the row": old_cursor}
if connection.vendor != "mysql":
    PAST_DJANGO["the connection"] = the_connection
if connection.vendor == "postgresql":
    PAST_DJANGO["COPY on an older cursor"] = copy
past_django = pytest.mark.parametrize("past_django", PAST_DJANGO.values(), ids=PAST_DJANGO)


@past_django
def test_i7_a_row_with_retry_that_wrote_past_django_keeps_its_note_alone(
    past_django: Callable[[], Callable[[Any], Any]],
) -> None:
    the.errands(3)
    parcels(3)
    of = dict(zip(range(3), Parcel.objects.order_by("priority"), strict=True))
    write = past_django()

    def handle(row: Errand) -> None:
        write(of[row.place])
        if row.place == 1:
            raise ValueError("the handler's own")

    report = the.transactional(handle, retry=Retry(backoff=60))()
    assert_run(report, processed=2, failed=1, to_retry=1)
    assert worked() == [0, 2]


def test_each_savepoint_of_a_row_is_released() -> None:
    """PostgreSQL keeps an entry for each that is open, and looks through them all."""
    parcels(4)

    def handle(row: Parcel) -> None:
        note(row)
        if row.priority == 1:
            raise ValueError

    with statements() as seen:
        assert_run(in_batches(handle)(), processed=3, failed=1)
    released = [sql for sql in seen if sql.startswith("RELEASE") and "dcl_row" in sql]
    assert len(released) == len(savepoints(seen)) == 4
