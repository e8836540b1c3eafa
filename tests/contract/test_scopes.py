"""The lazy savepoint of a row in a batch, and what goes past it elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import DatabaseError, connection, transaction

from tests.contract.batches import (
    in_batches,
    note,
    parcels,
    savepoints,
    sent,
    statements,
    worked,
)
from tests.models import Parcel, Scan

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


def test_the_rows_savepoint_is_not_one_that_on_commit_knows_of() -> None:
    parcels(3)
    ids: list[list[str]] = []

    def handle(row: Parcel) -> None:
        note(row)
        ids.append(list(connection.savepoint_ids))

    assert in_batches(handle)().processed == 3
    assert ids == [[], [], []]


def test_i7_set_rollback_takes_back_the_row_that_asked_for_it() -> None:
    parcels(3)

    def handle(row: Parcel) -> None:
        note(row)
        if row.priority == 1:
            transaction.set_rollback(True)

    report = in_batches(handle)()
    assert (report.processed, report.failed) == (2, 1)
    assert sent() == worked() == [0, 2]
    assert "rolled back" in str(report.failures[0].error)


def test_i7_set_rollback_before_any_statement_takes_back_the_row_that_asked_for_it() -> None:
    parcels(3)

    def handle(row: Parcel) -> None:
        if row.priority == 1:
            transaction.set_rollback(True)
            with pytest.raises(DatabaseError):
                note(row)
        else:
            note(row)

    report = in_batches(handle)()
    assert (report.processed, report.failed) == (2, 1)
    assert sent() == worked() == [0, 2]


def test_i7_an_atomic_block_that_marked_the_transaction_costs_its_own_row() -> None:
    parcels(3)

    def handle(row: Parcel) -> None:
        note(row)
        if row.priority == 1:
            try:
                with transaction.atomic(savepoint=False):
                    int("inside")
            except ValueError:
                pass

    report = in_batches(handle)()
    assert (report.processed, report.failed) == (2, 1)
    assert sent() == worked() == [0, 2]


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

    assert in_batches(handle)().processed == 3
    assert sent() == worked() == [0, 1, 2]
    assert sorted(Scan.objects.values_list("parcel__priority", flat=True)) == [0, 2]


def test_i7_a_cursor_that_is_older_than_the_row_opens_the_savepoint_too() -> None:
    parcels(3)
    cursor = connection.cursor()

    def handle(row: Parcel) -> None:
        cursor.execute("UPDATE tests_parcel SET note = 'worked' WHERE id = %s", [row.pk])
        if row.priority == 1:
            raise ValueError

    report = in_batches(handle)()
    cursor.close()
    assert (report.processed, report.failed) == (2, 1)
    assert sent() == worked() == [0, 2]


def test_i7_an_iterator_in_chunks_opens_the_savepoint_too() -> None:
    parcels(3)
    Scan.objects.create(parcel=Parcel.objects.create(sent=True, priority=50))

    def handle(row: Parcel) -> None:
        for _ in Scan.objects.iterator(chunk_size=1):
            note(row)
        if row.priority == 1:
            raise ValueError

    with statements() as seen:
        report = in_batches(handle)()
    assert (report.processed, report.failed) == (2, 1)
    assert len(savepoints(seen)) == 3
    assert worked() == [0, 2]


if connection.vendor == "postgresql":
    NEXT_MULTIXACT = "SELECT next_multixact_id::text::bigint FROM pg_control_checkpoint()"

    def test_i7_copy_goes_past_the_wrappers_and_opens_the_savepoint_all_the_same() -> None:
        parcels(3)

        def handle(row: Parcel) -> None:
            with connection.cursor() as cursor:
                with cursor.copy("COPY tests_tag (name) FROM STDIN") as copy:
                    copy.write_row([f"tag {row.priority}"])
                if row.priority == 1:
                    raise ValueError

        with statements() as seen:
            report = in_batches(handle)()
        assert (report.processed, report.failed) == (2, 1)
        assert len(savepoints(seen)) == 3
        with connection.cursor() as cursor:
            cursor.execute("SELECT name FROM tests_tag ORDER BY name")
            assert cursor.fetchall() == [("tag 0",), ("tag 2",)]

    def multixacts(handler: Any) -> int:
        """Return how many lists of lockers a batch of 100 rows makes."""
        Parcel.objects.all().delete()
        parcels(100)
        with connection.cursor() as cursor:
            ids = []
            for work in (lambda: None, in_batches(handler)):
                work()
                cursor.execute("CHECKPOINT")
                cursor.execute(NEXT_MULTIXACT)
                ids.append(cursor.fetchone()[0])
        assert sent() == list(range(100))
        return int(ids[1] - ids[0])

    def test_a_flip_makes_no_list_of_lockers_per_row() -> None:
        """The handler's savepoint is released before the flip; what is left is the rehearsal's."""
        # The counter is the whole server's: other sessions can only make a figure larger.
        assert min(multixacts(lambda row: Parcel.objects.exists()) for _ in range(5)) <= 5

    def test_a_write_to_the_locked_row_within_a_savepoint_would_make_one_per_row() -> None:
        """The broken variant: the test above can fail."""
        assert multixacts(note) >= 100


def test_a_savepoint_is_opened_for_the_rows_whose_handlers_use_the_database() -> None:
    parcels(10)

    def handle(row: Parcel) -> None:
        if row.priority in (3, 7):
            note(row)

    with statements() as seen:
        assert in_batches(handle)().processed == 10
    assert len(savepoints(seen)) == 2
    assert worked() == [3, 7]


def test_a_handler_that_leaves_a_wrapper_behind_does_not_break_the_rows_after_it() -> None:
    parcels(3)

    def wrapper(execute: Any, *args: Any) -> Any:
        return execute(*args)

    def handle(row: Parcel) -> None:
        connection.execute_wrappers.append(wrapper)
        note(row)
        if row.priority == 1:
            raise ValueError

    try:
        with statements() as seen:
            report = in_batches(handle)()
            connection.execute_wrappers[:] = connection.execute_wrappers[:1]
    finally:
        connection.execute_wrappers.clear()
    assert (report.processed, report.failed) == (2, 1)
    assert len(savepoints(seen)) == 3
    assert sent() == worked() == [0, 2]


def test_a_single_row_without_retry_needs_no_savepoint() -> None:
    parcels(3)

    def handle(row: Parcel) -> None:
        note(row)
        if row.priority == 1:
            raise ValueError

    with statements() as seen:
        report = in_batches(handle, batch_size=1)()
    assert (report.processed, report.failed) == (2, 1)
    assert savepoints(seen) == []
    assert sent() == worked() == [0, 2]


def test_another_alias_in_the_handler_opens_no_savepoint_on_this_one() -> None:
    parcels(2)
    with statements() as seen:
        report = in_batches(lambda row: Parcel.objects.using("other").count())()
    assert report.processed == 2
    assert savepoints(seen) == []


def test_the_processors_own_alias_is_the_one_that_is_watched() -> None:
    parcels(3)

    def handle(row: Parcel) -> None:
        Parcel.objects.using("other").filter(pk=row.pk).update(note="worked")
        if row.priority == 1:
            raise ValueError

    with statements("other") as seen:
        report = in_batches(handle, using="other")()
    assert (report.processed, report.failed) == (2, 1)
    assert len(savepoints(seen)) == 3
    assert sent() == worked() == [0, 2]
