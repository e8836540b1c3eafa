"""Errors that end the whole transaction: nothing is flipped without its work."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from django.db import DatabaseError, OperationalError, connection, transaction

from dcl_processor import BatchProcessor, Retry
from dcl_processor.exceptions import TransactionLost
from tests.contract.support import errands as the
from tests.contract.support.batches import note, sent, worked
from tests.contract.support.deadlocks import deadlock
from tests.contract.support.parcels import in_batches, parcels
from tests.contract.support.reports import assert_run
from tests.contract.support.sessions import end_session
from tests.models import Errand, Parcel

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

HAS_ROW_LOCKS = connection.features.has_select_for_update
MARIADB = connection.vendor == "mysql"


if HAS_ROW_LOCKS:

    @pytest.mark.parametrize("swallowed", [False, True])
    def test_i7_a_deadlock_in_a_batch_flips_no_row_without_its_work(swallowed: bool) -> None:
        """MariaDB ends the transaction, and the batch is redone; PostgreSQL ends the savepoint.

        A deadlock that was swallowed on PostgreSQL has broken the row's work off, too.
        """
        parcels(5)
        calls: list[int] = []
        with deadlock() as run_into_it:

            def handle(row: Parcel) -> None:
                calls.append(row.priority)
                note(row)
                if row.priority == 2 and calls.count(2) == 1:
                    try:
                        run_into_it()
                    except OperationalError:
                        if not swallowed:
                            raise

            report = in_batches(handle)()
        assert sent() == worked()
        if MARIADB:
            assert_run(report, processed=5)
            assert calls == [0, 1, 2, 0, 1, 2, 3, 4]
        else:
            assert_run(report, processed=4, failed=1)
            assert calls == [0, 1, 2, 3, 4]
            assert sent() == [0, 1, 3, 4]

    def test_i7_a_deadlock_within_a_nested_atomic_block_flips_no_row_without_its_work() -> None:
        parcels(4)
        calls: list[int] = []
        with deadlock() as run_into_it:

            def handle(row: Parcel) -> None:
                calls.append(row.priority)
                note(row)
                if row.priority == 1 and calls.count(1) == 1:
                    try:
                        with transaction.atomic():
                            run_into_it()
                    except DatabaseError:
                        pass

            report = in_batches(handle)()
        assert sent() == worked()
        assert_run(report, processed=4)
        assert calls == ([0, 1, 0, 1, 2, 3] if MARIADB else [0, 1, 2, 3])

    def test_i7_a_deadlock_of_a_row_alone_is_its_failure_and_its_attempt() -> None:
        the.errands(3)
        with deadlock() as run_into_it:

            def handle(row: Errand) -> None:
                Errand.objects.filter(pk=row.pk).update(result="worked")
                if row.place == 1:
                    run_into_it()

            report = in_one_batch(handle, batch_size=1)()
        assert_run(report, processed=2, failed=1, to_retry=1)
        assert isinstance(report.failures[0].error, OperationalError)
        rows = Errand.objects.order_by("place").values_list("done", "result", "attempts")
        assert list(rows) == [(True, "worked", 0), (False, "", 1), (True, "worked", 0)]


def in_one_batch(handler: Any, **options: Any) -> BatchProcessor[Errand]:
    """Make a processor that tries a row again, with all rows in one batch."""
    return the.transactional(handler, **{"batch_size": 100, "retry": Retry(backoff=60), **options})


if HAS_ROW_LOCKS:

    @pytest.mark.parametrize("batch_size", [1, 100])
    def test_an_attempt_is_counted_although_the_session_was_ended_under_the_handler(
        batch_size: int,
    ) -> None:
        the.errands(3)

        def handle(row: Errand) -> None:
            Errand.objects.filter(pk=row.pk).update(result="worked")
            if row.place == 1:
                end_session()
                raise ValueError("the handler's own")

        report = in_one_batch(handle, batch_size=batch_size)()
        assert_run(report, processed=2, failed=1, to_retry=1)
        assert str(report.failures[0].error) == "the handler's own"
        rows = Errand.objects.order_by("place").values_list("done", "result", "attempts")
        assert list(rows) == [(True, "worked", 0), (False, "", 1), (True, "worked", 0)]
        assert Errand.objects.get(place=1).last_error == "ValueError: the handler's own"
        assert Errand.objects.get(place=1).next_attempt_at is not None

    @pytest.mark.parametrize("batch_size", [1, 100])
    def test_a_session_that_was_ended_and_a_handler_that_noticed_nothing_settle_nothing(
        batch_size: int,
    ) -> None:
        parcels(3)
        calls: list[int] = []

        def handle(row: Parcel) -> None:
            calls.append(row.priority)
            note(row)
            if row.priority == 1 and calls.count(1) == 1:
                end_session()

        report = in_batches(handle, batch_size=batch_size)()
        assert sent() == worked()
        if batch_size == 1:
            assert_run(report, processed=2, failed=1)
        else:
            # Redone one by one, and this time its session lives: no row is to blame.
            assert_run(report, processed=3)

    def test_an_attempt_is_not_counted_of_a_row_that_another_copy_has_finished_meanwhile(
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """The lock was lost with the session; the row is asked again before it is written."""
        row = Errand.objects.create()

        def handle(row: Errand) -> None:
            end_session()
            Errand.objects.using("other").filter(pk=row.pk).update(done=True, result="theirs")
            raise ValueError

        assert_run(in_one_batch(handle)(), failed=1)
        row.refresh_from_db()
        assert (row.done, row.result, row.attempts, row.last_error) == (True, "theirs", 0, "")
        assert "no attempt was counted" not in caplog.text


def commit_past_django() -> None:
    cursor = connection.connection.cursor()
    cursor.execute("COMMIT")
    cursor.execute("BEGIN")


def commit() -> None:
    with connection.cursor() as cursor:
        cursor.execute("COMMIT")


COMMITS = {"a commit": commit, "a commit past Django": commit_past_django}
if MARIADB:

    def make_a_table() -> None:
        with connection.cursor() as cursor:
            cursor.execute("CREATE OR REPLACE TABLE tests_made (a int)")

    def empty_a_table() -> None:
        with connection.cursor() as cursor:
            cursor.execute("TRUNCATE TABLE django_session")

    def begin() -> None:
        with connection.cursor() as cursor:
            cursor.execute("BEGIN")

    COMMITS |= {"DDL": make_a_table, "TRUNCATE": empty_a_table, "BEGIN": begin}


# No statement of its own shows that the transaction has ended.
ENDS = {**COMMITS, "the end of the session": connection.close}


@pytest.mark.parametrize("commits", ENDS.values(), ids=ENDS)
def test_a_commit_in_a_batch_fails_its_row_by_name_and_the_others_are_redone_and_told(
    commits: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    """What it committed of the rows before it stays, without their flips; the log says which."""
    parcels(4)
    calls: list[int] = []
    keys = dict(Parcel.objects.values_list("priority", "pk"))

    def handle(row: Parcel) -> None:
        calls.append(row.priority)
        note(row)
        if row.priority == 2:
            commits()

    with caplog.at_level(logging.WARNING, logger="dcl_processor"):
        report = in_batches(handle)()
    if MARIADB:
        with connection.cursor() as cursor:
            cursor.execute("DROP TABLE IF EXISTS tests_made")
    assert_run(report, processed=3, failed=1, redone=2)
    [failure] = report.failures
    assert (failure.pk, type(failure.error)) == (keys[2], TransactionLost)
    assert calls == [0, 1, 2, 0, 1, 3]
    assert sent() == [0, 1, 3]
    [told] = [record.getMessage() for record in caplog.records if "again" in record.getMessage()]
    assert f"the handler of row {keys[2]} ended the transaction" in told
    assert "these other rows are handled again" in told
    assert f"{keys[0]}, {keys[1]}" in told
