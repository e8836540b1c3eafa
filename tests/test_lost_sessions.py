"""A session that ends inside a transaction: Django opens a new connection to roll it back."""

from __future__ import annotations

import pytest

from tests.contract.support import errands as the
from tests.contract.support.reports import assert_run
from tests.contract.support.sessions import before_statement, end_session

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


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
