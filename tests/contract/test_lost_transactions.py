"""Errors that end the whole transaction: nothing is flipped without its work."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from django.db import DatabaseError, OperationalError, connection, transaction
from django.db.backends.postgresql.psycopg_any import IsolationLevel

from dcl_processor import BatchProcessor, Retry, batch_processor
from dcl_processor.engine import lane
from dcl_processor.exceptions import TransactionLost, Unsupported
from dcl_processor.locking.isolation import ReadCommitted
from dcl_processor.locking.row_locks import lock_timeout
from tests.contract.support import errands as the
from tests.contract.support.batches import note, sent, worked
from tests.contract.support.deadlocks import deadlock
from tests.contract.support.messages import separately
from tests.contract.support.parcels import in_batches, parcels
from tests.contract.support.reports import assert_run
from tests.contract.support.sessions import before_statement, connected, end_session
from tests.models import Depot, Errand, Parcel

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


# --- what a server answers to a claim when others are in the way: the row is for a later pass
#
# The answers are the server's own; that they come is asked for, since what brings them about
# differs from one isolation level, and one version of a server, to another.


SAYS = {
    "postgresql": {
        code: f"DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '{code}'; END $$"
        for code in ("40001", "40P01", "55P03")
    },
    "mysql": {
        code: f"SIGNAL SQLSTATE 'HY000' SET MYSQL_ERRNO = {code}"
        for code in ("1213", "1205", "1020", "3572")
    },
}
#: A statement that a person, or a time-out of the server's, ended; or without memory, or a disk.
ENDED = {
    "postgresql": {
        code: f"DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '{code}'; END $$"
        for code in ("57014", "53100", "53200")
    },
    "mysql": {
        code: f"SIGNAL SQLSTATE 'HY000' SET MYSQL_ERRNO = {code}"
        for code in ("1969", "1317", "1021", "1038")
    },
}.get(connection.vendor, {})
#: Without a table, or a permission.
REFUSED = {
    "postgresql": "SELECT 1 FROM tests_missing",
    "mysql": "SIGNAL SQLSTATE '42000' SET MYSQL_ERRNO = 1142",
}
HAS_SERVER = connection.vendor in SAYS


def run_while_the_server_says(sql: str, at: int, rows: int = 1) -> tuple[int, int, int]:
    """Run over three rows; the claims of so many, from this place on, are answered so."""
    parcels(3)
    calls: list[int] = []
    run = batch_processor(
        pending=Parcel.objects.filter(sent=False).order_by("priority"),
        done={"sent": True},
        strict_order=True,
    )(lambda row: calls.append(row.priority))

    def answer(execute: Callable[..., Any], asked: str, *args: Any) -> Any:
        nonlocal rows
        if rows and len(calls) == at and "SKIP LOCKED" in asked:
            rows -= 1
            with connection.cursor() as cursor:
                cursor.execute(sql)
        return execute(asked, *args)

    with separately(), connection.execute_wrapper(answer):
        report = run(wait_for_locked=0)
    assert sorted(calls) == [place for place in range(3) if place != at]
    assert Parcel.objects.filter(sent=False).count() == 1
    return report.processed, report.failed, report.skipped


if HAS_SERVER:

    @pytest.mark.parametrize("at", [0, 1])
    @pytest.mark.parametrize("code", SAYS[connection.vendor])
    def test_contention_in_a_claim_leaves_the_row_for_a_later_pass(code: str, at: int) -> None:
        said = run_while_the_server_says(SAYS[connection.vendor][code], at)
        assert said == (2, 0, 1)

    @pytest.mark.parametrize("at", [0, 1])
    @pytest.mark.parametrize("code", ENDED)
    def test_a_claim_that_is_ended_is_the_failure_of_its_row(code: str, at: int) -> None:
        said = run_while_the_server_says(ENDED[code], at)
        assert said == (2, 1, 0)

    def test_a_server_without_time_for_any_claim_ends_the_run(
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(lane, "MOST_REFUSED", 2)
        with pytest.raises(DatabaseError):
            run_while_the_server_says(next(iter(ENDED.values())), 1, rows=2)
        assert Parcel.objects.filter(sent=False).count() == 2

    def test_any_other_error_in_a_claim_ends_the_run() -> None:
        with pytest.raises(DatabaseError):
            run_while_the_server_says(REFUSED[connection.vendor], 1, rows=9)
        assert Parcel.objects.filter(sent=False).count() == 2


if connection.vendor == "mysql":

    def test_a_wait_for_a_lock_gives_the_session_its_own_limit_back() -> None:
        """Not the server's default: a limit may be set in ``init_command``."""

        def limit() -> float:
            with connection.cursor() as cursor:
                cursor.execute("SELECT @@SESSION.max_statement_time")
                return float(cursor.fetchone()[0])

        with connection.cursor() as cursor:
            cursor.execute("SET SESSION max_statement_time = 7")
        try:
            with transaction.atomic(), lock_timeout("default", 0.5):
                assert limit() == 0.5
            assert limit() == 7
        finally:
            connection.close()


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
    "sqlite": [{}, {"transaction_mode": "IMMEDIATE"}, {"transaction_mode": "EXCLUSIVE"}],
}
options = pytest.mark.parametrize("options", LEVELS[connection.vendor], ids=str)


def processor(calls: list[Any]) -> BatchProcessor[Parcel]:
    """Ask a spanning question: the flag that counts is the depot's."""

    @batch_processor(
        pending=lambda: Parcel.objects.filter(sent=False, depot__open=True), done={"sent": True}
    )
    def send(row: Parcel) -> None:
        calls.append(sees_what_others_commit())

    return send


def sees_what_others_commit() -> bool:
    """Tell whether each statement of the running transaction has a snapshot of its own."""
    if not connection.features.has_select_for_update:
        return True  # SQLite: we hold the lock for writing, no session can commit anything
    before = Depot.objects.count()
    Depot.objects.using("other").create()
    return Depot.objects.count() == before + 1


def between_lock_and_question(sql: str) -> bool:
    """Recognise the second statement of a spanning claim: it joins, and reads whole rows."""
    whole = re.search(r"^SELECT \W?tests_parcel\W+id\W?, .* JOIN\W+tests_depot", sql)
    return bool(whole) and "UPDATE" not in sql


def close_depots() -> None:
    Depot.objects.using("other").update(open=False)


if connection.features.has_select_for_update:
    # On SQLite no session can commit between our lock and our question.

    @options
    def test_the_second_check_sees_what_was_committed_after_the_lock(
        options: dict[str, Any],
    ) -> None:
        Parcel.objects.create(depot=Depot.objects.create())
        calls: list[Any] = []
        with connected(options), before_statement(between_lock_and_question, close_depots):
            report = processor(calls)()
        assert_run(report, stale=1)
        assert calls == []


# What changes the level of the transactions that are yet to begin, in a handler.
CHANGES: dict[str, list[str]] = {
    "postgresql": [
        "SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL REPEATABLE READ",
        "SET default_transaction_isolation = 'serializable'",
        "SELECT set_config('default_transaction_isolation', 'repeatable read', false)",
    ],
    "mysql": ["SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ"],
    "sqlite": [],
}

if connection.features.has_select_for_update:

    @pytest.mark.parametrize("change", CHANGES[connection.vendor])
    def test_a_level_that_a_handler_changes_is_not_that_of_the_next_claim(change: str) -> None:
        depots = [Depot.objects.create(), Depot.objects.create()]
        Parcel.objects.bulk_create([Parcel(depot=depot) for depot in depots])
        calls: list[Any] = []

        @batch_processor(
            pending=lambda: Parcel.objects.filter(sent=False, depot__open=True), done={"sent": True}
        )
        def send(row: Parcel) -> None:
            calls.append(row.depot_id)
            with connection.cursor() as cursor:
                cursor.execute(change)

        def second_question(sql: str) -> bool:
            return bool(calls) and between_lock_and_question(sql)

        try:
            with before_statement(second_question, close_depots):
                report = send()
        finally:
            connection.close()
        assert calls == [depots[0].pk]
        assert_run(report, processed=1, stale=1)

    def test_the_connections_own_level_is_given_back() -> None:
        levels: list[str] = []

        def level() -> str:
            with transaction.atomic(), connection.cursor() as cursor:
                cursor.execute(ASKS_LEVEL[connection.vendor])
                return str(cursor.fetchone()[0])

        with connected(LEVELS[connection.vendor][-1 if connection.vendor == "mysql" else 2]):
            before = level()
            Parcel.objects.create(depot=Depot.objects.create())
            assert_run(processor(levels)(), processed=1)
            assert level() == before

    def test_a_transaction_of_our_own_has_the_level_and_gives_it_back() -> None:
        """Such as that of a renewal, or of an operator's action."""

        def level() -> str:
            with connection.cursor() as cursor:
                cursor.execute(ASKS_LEVEL[connection.vendor])
                return str(cursor.fetchone()[0]).lower()

        with connected(LEVELS[connection.vendor][2]):
            for _ in range(2):
                with ReadCommitted("default"):
                    if connection.vendor == "postgresql":  # InnoDB shows the session's
                        assert level() == "read committed"
                with transaction.atomic():
                    assert level().replace("-", " ") == "serializable"


ASKS_LEVEL = {"postgresql": "SHOW transaction_isolation", "mysql": "SELECT @@session.tx_isolation"}


def test_the_server_is_asked_at_most_once_per_connection() -> None:
    depot = Depot.objects.create()
    asked: list[str] = []

    def watch(execute: Any, sql: str, *args: Any) -> Any:
        if sql.startswith("SHOW"):
            asked.append(sql)
        return execute(sql, *args)

    run = processor([])
    vars(run)["process"] = lambda row: None  # ask nothing of our own
    connection.close()
    with connection.execute_wrapper(watch):
        for _ in range(3):
            Parcel.objects.create(depot=depot)
            Parcel.objects.create(depot=depot)
            assert_run(run(), processed=2)
    # PostgreSQL takes the level with each BEGIN.
    assert len(asked) == (1 if connection.vendor == "mysql" else 0)


def test_a_connection_without_autocommit_is_refused() -> None:
    with connected({}, autocommit=False) as wrapper:
        with pytest.raises(Unsupported, match=r"expected .* autocommit .* got AUTOCOMMIT=False"):
            processor([])()
        wrapper.rollback()


if HAS_ROW_LOCKS:

    def test_i20_a_transaction_of_the_caller_on_another_alias_is_left_alone() -> None:
        """Although the handler has met an error there."""
        the.errands(2)

        def handle(row: Errand) -> None:
            with suppress(DatabaseError), transaction.atomic(using="other"):
                Errand.objects.using("other").extra(where=["tests_no_such"]).exists()
            if row.place == 0:
                raise ValueError(row.place)

        with transaction.atomic(using="other"):
            Errand.objects.using("other").create(place=9)
            assert_run(the.at_least_once(handle)(), processed=1, failed=1)
        assert Errand.objects.filter(place=9).exists()
