"""Errors that end the whole transaction: nothing is flipped without its work."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
from django.db import OperationalError, connection
from django.db.backends.postgresql.psycopg_any import IsolationLevel

from dcl_processor import Retry
from dcl_processor.exceptions import TransactionLost, Unsupported
from tests.contract.support import errands as the
from tests.contract.support.deadlocks import deadlock
from tests.contract.support.parcels import (
    UNSENT,
    in_batches,
    note,
    parcels,
    processor,
    sent,
    worked,
)
from tests.contract.support.reports import assert_run
from tests.contract.support.sessions import before_statement, connected, end_session
from tests.contract.support.temporary import execute
from tests.models import Depot, Errand, Parcel

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

HAS_ROW_LOCKS = connection.features.has_select_for_update
MARIADB = connection.vendor == "mysql"


if HAS_ROW_LOCKS:

    @pytest.mark.parametrize("swallowed", [False, True])
    def test_i7_a_deadlock_in_a_batch_flips_no_row_without_its_work(swallowed: bool) -> None:
        """MariaDB ends the transaction, and the batch is redone; PostgreSQL ends the savepoint.

        A deadlock that was swallowed has broken the row's work off, too.
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
        again, redone = ([0, 1], 2) if MARIADB else ([], 0)
        if MARIADB and not swallowed:
            assert_run(report, processed=5)
            assert calls == [0, 1, 2, 0, 1, 2, 3, 4]
        else:
            assert_run(report, processed=4, failed=1, redone=redone)
            assert sorted(calls) == sorted([0, 1, 2, 3, 4, *again])
            assert sent() == [0, 1, 3, 4]

    @pytest.mark.parametrize("fails", [False, True], ids=["handled", "failed"])
    def test_an_attempt_is_not_counted_of_a_row_that_another_copy_has_finished_meanwhile(
        fails: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The lock was lost with the session; the row is asked again before it is written."""
        row = Errand.objects.create()

        def handle(row: Errand) -> None:
            end_session()
            Errand.objects.using("other").filter(pk=row.pk).update(done=True, result="theirs")
            if fails:
                raise ValueError

        assert_run(the.transactional(handle, retry=Retry(backoff=60))(), failed=1)
        row.refresh_from_db()
        assert (row.done, row.result, row.attempts, row.last_error) == (True, "theirs", 0, "")
        assert "no attempt was counted" not in caplog.text


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_commit_in_a_batch_fails_its_row_by_name_and_the_others_are_redone_and_told(
    is_closed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """What it committed of the rows before it stays, without their flips; the log says which."""
    parcels(4)
    calls: list[int] = []
    keys = dict(Parcel.objects.values_list("priority", "pk"))

    def handle(row: Parcel) -> None:
        calls.append(row.priority)
        note(row)
        if row.priority == 2:
            if is_closed:
                connection.close()  # no statement shows that the transaction has ended
            else:
                connection.cursor().execute("COMMIT")

    with caplog.at_level(logging.WARNING, logger="dcl_processor"):
        report = in_batches(handle)()
    assert_run(report, processed=3, failed=1, redone=2)
    [failure] = report.failures
    assert (failure.pk, type(failure.error)) == (keys[2], TransactionLost)
    assert calls == [0, 1, 2, 0, 1, 3]
    assert sent() == [0, 1, 3]
    [told] = [record.getMessage() for record in caplog.records if "again" in record.getMessage()]
    assert f"the handler of row {keys[2]} ended the transaction" in told
    assert "these other rows are handled again" in told
    assert f"{keys[0]}, {keys[1]}" in told


# --- what a server answers to a claim when others are in the way: the row is for a later pass
#
# The answers are the server's own; that they come is asked for, since what brings them about
# differs from one isolation level, and one version of a server, to another.


CONTENTION = {
    "postgresql": ("40001", "40P01", "55P03"),
    "mysql": ("1213", "1205", "1020", "3572"),
    "sqlite": (),
}[connection.vendor]


def answered(code: str) -> str:
    """Return a statement that the server answers with this error."""
    if connection.vendor == "postgresql":
        return f"DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '{code}'; END $$"
    return f"SIGNAL SQLSTATE 'HY000' SET MYSQL_ERRNO = {code}"


if HAS_ROW_LOCKS:

    @pytest.mark.parametrize(("at", "batch_size"), [(0, 1), (1, 1), (0, 3)])
    @pytest.mark.parametrize("code", CONTENTION)
    def test_contention_in_a_claim_leaves_its_rows_for_a_later_pass(
        code: str, at: int, batch_size: int
    ) -> None:
        parcels(3)
        calls: list[int] = []

        def claims(sql: str) -> bool:
            return len(calls) == at and "SKIP LOCKED" in sql

        options: dict[str, Any] = {"pending": UNSENT.order_by("priority"), "batch_size": batch_size}
        run = processor(lambda row: calls.append(row.priority), **options)
        with before_statement(claims, lambda: execute(answered(code))):
            report = run(wait_for_locked=0)
        assert_run(report, processed=3 - batch_size, skipped=batch_size)
        left = range(at, at + batch_size)
        assert sorted(calls) == [place for place in range(3) if place not in left]


# --- connections whose default would make the second check read an old snapshot


# Every way in which a connection may come by another level than READ COMMITTED.
LEVELS: dict[str, list[dict[str, Any]]] = {
    "postgresql": [
        {},
        {"isolation_level": IsolationLevel.REPEATABLE_READ},  # each driver has its own numbers
        {"isolation_level": IsolationLevel.SERIALIZABLE},
        {"options": "-c default_transaction_isolation=serializable"},
        {"options": "-c default_transaction_isolation=repeatable\\ read"},
    ],
    "mysql": [{}, {"isolation_level": "repeatable read"}, {"isolation_level": "serializable"}],
}

# What changes the level of the transactions that are yet to begin, in a handler.
CHANGES: dict[str, list[str]] = {
    "postgresql": [
        "SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL REPEATABLE READ",
        "SET default_transaction_isolation = 'serializable'",
        "SELECT set_config('default_transaction_isolation', 'repeatable read', false)",
    ],
    "mysql": ["SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ"],
}

#: A spanning question: the flag that counts is the depot's.
OF_OPEN_DEPOTS = UNSENT.filter(depot__open=True)


def between_lock_and_question(sql: str) -> bool:
    """Recognise the second statement of a spanning claim: it joins, and reads whole rows."""
    whole = re.search(r"^SELECT \W?tests_parcel\W+id\W?, .* JOIN\W+tests_depot", sql)
    return bool(whole) and "UPDATE" not in sql


def close_depots() -> None:
    Depot.objects.using("other").update(open=False)


# On SQLite no session can commit between our lock and our question.
if HAS_ROW_LOCKS:

    @pytest.mark.parametrize("options", LEVELS[connection.vendor], ids=str)
    def test_the_second_check_sees_what_was_committed_after_the_lock(
        options: dict[str, Any],
    ) -> None:
        Parcel.objects.create(depot=Depot.objects.create())
        run = processor(the.raising(AssertionError()), pending=OF_OPEN_DEPOTS)
        with connected(options), before_statement(between_lock_and_question, close_depots):
            assert_run(run(), stale=1)

    @pytest.mark.parametrize("options", LEVELS[connection.vendor], ids=str)
    def test_a_handler_reads_what_was_committed_since_it_began(options: dict[str, Any]) -> None:
        Parcel.objects.create()
        seen: list[int] = []

        def handle(_: Parcel) -> None:
            seen.append(Depot.objects.count())
            Depot.objects.using("other").create()
            seen.append(Depot.objects.count())

        with connected(options):
            assert_run(processor(handle)(), processed=1)
        assert seen == [0, 1]

    @pytest.mark.parametrize("change", CHANGES[connection.vendor])
    def test_a_level_that_a_handler_changes_is_not_that_of_the_next_claim(change: str) -> None:
        depots = [Depot.objects.create(), Depot.objects.create()]
        Parcel.objects.bulk_create([Parcel(depot=depot) for depot in depots])
        calls: list[Any] = []

        def send(row: Parcel) -> None:
            calls.append(row.depot_id)
            execute(change)

        def second_question(sql: str) -> bool:
            return bool(calls) and between_lock_and_question(sql)

        try:
            with before_statement(second_question, close_depots):
                report = processor(send, pending=OF_OPEN_DEPOTS)()
        finally:
            connection.close()
        assert calls == [depots[0].pk]
        assert_run(report, processed=1, stale=1)


def test_a_connection_without_autocommit_is_refused() -> None:
    with connected({}, autocommit=False) as wrapper:
        with pytest.raises(Unsupported, match=r"expected .* autocommit .* got AUTOCOMMIT=False"):
            processor(the.ignore)()
        wrapper.rollback()
