"""A session that ends inside a transaction: its ROLLBACK makes Django connect anew by itself."""

from __future__ import annotations

import pytest
from django.db import connection, connections

from tests.contract.support import errands as the
from tests.contract.support.reports import assert_run
from tests.contract.support.sessions import before_statement

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


def end_session() -> None:
    """End the session of the default alias from another one, and wait until it has gone."""
    driver = connection.connection
    assert driver is not None
    with connections["other"].cursor() as cursor:
        cursor.execute("SELECT pg_terminate_backend(%s, 30000)", [driver.info.backend_pid])
        assert cursor.fetchone() == (True,)


def writes_done(sql: str) -> bool:
    return sql.startswith("UPDATE") and '"done" = ' in sql


def test_before_the_flip_of_a_result_it_costs_nothing() -> None:
    """That flip is verified in a transaction of its own, after the work."""
    [row] = the.errands(1)
    run = the.at_least_once(the.ignore, done=lambda row, result: {"done": True}, retry=the.retry())
    with before_statement(writes_done, end_session):
        report = run()
    assert_run(report, processed=1)
    assert the.state(row)["done"]


def test_in_the_rehearsal_it_is_no_rows_failure() -> None:
    [row] = the.errands(1)
    calls: list[int] = []
    run = the.at_least_once(lambda row: calls.append(row.pk), retry=the.retry())
    with before_statement(writes_done, end_session):
        report = run()
    assert_run(report, processed=1)
    assert calls == [row.pk]
    assert the.state(row)["attempts"] == 0  # cleared by the success
