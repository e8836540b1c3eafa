"""A handler that catches an error of the database and goes on has its row for itself all the same.

PostgreSQL releases all locks of a transaction at the moment of an error, before any ROLLBACK, those
that a savepoint stands behind excepted.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
from django.db import DatabaseError, connection, transaction

from tests.contract.support import errands as the
from tests.contract.support.groups import in_order, rows_of
from tests.contract.support.reports import assert_run
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True)


def by_the_orm() -> None:
    Errand.objects.create(code="taken", done=True)


def by_a_cursor() -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT tests_no_such_function()")


def in_a_block() -> None:
    with transaction.atomic(savepoint=False):
        by_the_orm()


each_error = pytest.mark.parametrize("fail", [by_the_orm, by_a_cursor, in_a_block])


@each_error
@pytest.mark.parametrize("batch_size", [1, 4])
def test_no_other_worker_gets_the_row_meanwhile(fail: Callable[[], None], batch_size: int) -> None:
    rows = the.errands(3)
    Errand.objects.create(place=-1, code="taken", done=True)
    calls: list[int] = []
    other = the.transactional(lambda row: calls.append(row.place))

    def handle(row: Errand) -> None:
        calls.append(row.place)
        if row.place == 1:
            with suppress(DatabaseError):
                fail()
            report = the.elsewhere(lambda: other.run(filter=the.only(row), wait_for_locked=0))
            assert_run(report, skipped=1, stopped="busy")

    report = the.transactional(handle, batch_size=batch_size)()
    if report.processed == 3:  # MariaDB goes on in a transaction that has met an error
        assert connection.vendor == "mysql"
    else:
        assert_run(report, processed=2, failed=1)
        assert [failure.pk for failure in report.failures] == [rows[1].pk]
    assert calls == [0, 1, 2]
    assert the.places(done=False) == ([] if report.processed == 3 else [1])


@each_error
def test_no_other_worker_gets_a_row_of_a_call_for_several(fail: Callable[[], None]) -> None:
    rows = the.errands(3)
    Errand.objects.create(place=-1, code="taken", done=True)
    calls: list[list[int]] = []
    other = the.transactional(lambda row: calls.append([row.place]))

    def handle(given: list[Errand]) -> None:
        calls.append([row.place for row in given])
        if len(given) > 1:
            with suppress(DatabaseError):
                fail()
            report = the.elsewhere(lambda: other.run(wait_for_locked=0))
            assert_run(report, skipped=3, stopped="busy")

    run = the.transactional(the.ignore, process_batch=handle, batch_size=3)
    report = run()
    assert_run(report, processed=3, redone=report.redone)
    # Only MariaDB can go on in a transaction that has met an error.
    is_redone = connection.vendor != "mysql" or report.redone > 0
    assert calls == [[0, 1, 2], *([[row.place] for row in rows] if is_redone else [])]
    assert the.places(done=False) == []


if connection.vendor == "postgresql":

    @each_error
    def test_the_order_of_a_key_is_kept(fail: Callable[[], None]) -> None:
        rows = rows_of(7, 7)
        calls: list[int] = []
        other = in_order("transactional", lambda row: calls.append(row.pk))

        def handle(row: Errand) -> None:
            calls.append(row.pk)
            if row.pk == rows[0].pk:
                with suppress(DatabaseError):
                    fail()
                report = the.elsewhere(lambda: other.run(wait_for_locked=0))
                assert report.processed == 0
                raise ValueError("the handler's own")

        Errand.objects.create(place=-1, code="taken", done=True)
        report = in_order("transactional", handle)()
        assert_run(report, failed=1, held=1, stopped="drained")
        assert calls == [rows[0].pk]
        assert the.places(done=True) == [-1]
