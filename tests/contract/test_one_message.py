"""A flip and its COMMIT that go in one message: what comes in between."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connection, transaction

from dcl_processor.sql.messages import send_together
from tests import seams
from tests.contract.support import errands as the
from tests.contract.support.reports import assert_run
from tests.contract.support.sessions import end_session
from tests.contract.support.temporary import at_update, execute
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

#: What drops a row in words that are not those of other triggers, so that flips still wait.
DROP = "RETURN CASE WHEN false THEN NEW END"


def test_a_callback_runs_before_the_next_row_is_claimed() -> None:
    rows = the.errands(4)
    seen: list[Any] = []

    def handle(row: Errand) -> None:
        seen.append(row.pk)

        def callback() -> None:
            done = the.elsewhere(lambda: Errand.objects.get(pk=row.pk).done)
            seen.append((row.pk, done, connection.in_atomic_block))

        transaction.on_commit(callback)

    assert the.transactional(handle)().processed == 4
    assert seen == [each for row in rows for each in (row.pk, (row.pk, True, False))]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the messages of several statements."""
    found = list[str]()

    def send(cursor: Any, statements: Any) -> list[Any]:
        found.append("; ".join([each.sql for each in statements]))
        return send_together(cursor, statements)

    seams.replace(monkeypatch, seams.SEND_TOGETHER, send)
    return found


def test_flips_that_differ_from_row_to_row_are_one_message(sent: list[str]) -> None:
    """Each of them still fails if it does not write its row."""
    rows = the.errands(20)
    run = the.transactional(lambda row: row.place, done=the.with_result, batch_size=10)
    assert run().processed == 20
    assert max(each.count(" SET ") for each in sent) == 10
    Errand.objects.update(done=False)
    with at_update("NEW.place = 2 AND NEW.done", DROP):
        report = run()
    assert (report.processed, report.failed, report.redone) == (19, 1, 10)
    assert report.failures[0].pk == rows[2].pk


def test_a_handler_that_has_committed_by_itself_is_not_taken_for_its_flip() -> None:
    """Its transaction is committed, and the session ends before the flip."""
    rows = the.errands(4)

    def handle(row: Errand) -> None:
        if row.place == 2:
            execute("COMMIT; BEGIN")
            end_session()

    report = the.transactional(handle)()
    assert_run(report, processed=3, failed=1)
    assert [failure.pk for failure in report.failures] == [rows[2].pk]
    assert the.places(done=False) == [2]
