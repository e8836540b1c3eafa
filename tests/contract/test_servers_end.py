"""What a server does to a run: it ends the session, takes no writes, or has its tables locked."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import OperationalError, connection, connections, transaction

from dcl_processor import Lease, Retry
from dcl_processor.exceptions import SessionLost
from tests.contract.support import errands as the
from tests.contract.support.parcels import UNSENT, parcels, processor
from tests.contract.support.reports import assert_run
from tests.contract.support.sessions import before_statement, connected, end_session, until_ended
from tests.contract.support.temporary import execute, temporary
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

MARIADB = connection.vendor == "mysql"
HAS_SERVER = connection.vendor != "sqlite"


TIMEOUTS = {
    "postgresql": ["idle_in_transaction_session_timeout = '100ms'"],
    "mysql": ["wait_timeout = 1", "idle_transaction_timeout = 1"],
    "sqlite": [],
}

if HAS_SERVER:

    @pytest.mark.parametrize("batch_size", [1, 3])
    @pytest.mark.parametrize("timeout", TIMEOUTS[connection.vendor])
    def test_a_session_that_the_server_ended_is_not_the_handlers_fault(
        timeout: str, batch_size: int
    ) -> None:
        the.errands(3)

        def handle(row: Errand) -> None:
            if row.place == 1:
                execute(f"SET SESSION {timeout}")
                until_ended(connection)

        report = the.transactional(handle, retry=Retry(backoff=600), batch_size=batch_size)()
        assert_run(report, processed=2, failed=1, to_retry=1)
        [failure] = report.failures
        assert type(failure.error) is SessionLost
        assert "that the server or the network ended" in str(failure.error)
        assert failure.error.__cause__ is not None
        rows = Errand.objects.order_by("place").values_list("done", "attempts")
        assert list(rows) == [(True, 0), (False, 1), (True, 0)]


READ_ONLY: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "postgresql": lambda: connected({"options": "-c default_transaction_read_only=on"}),
    "sqlite": lambda: temporary("PRAGMA query_only = 1", "PRAGMA query_only = 0"),
}


if not MARIADB:  # whose InnoDB locks rows all the same

    def test_no_handler_is_called_while_the_database_is_read_only() -> None:
        parcels(2)
        calls: list[int] = []
        run = processor(lambda row: calls.append(row.pk))
        with READ_ONLY[connection.vendor]():
            assert_run(run(), failed=2)
        assert calls == []
        assert_run(run(), processed=2)


if connection.vendor == "postgresql":

    @pytest.mark.parametrize("rehearsed", [0, 1])
    def test_a_table_that_is_locked_for_a_migration_is_contention(rehearsed: int) -> None:
        """What ``lock_timeout`` ends in a claim is for a later pass, and no row's failure."""
        parcels(3)
        calls: list[int] = []
        run = processor(lambda row: calls.append(row.priority), pending=UNSENT.order_by("priority"))

        def claims(sql: str) -> bool:
            return len(calls) == rehearsed and "SKIP LOCKED" in sql

        migration = transaction.atomic(using="other")

        def lock() -> None:
            migration.__enter__()
            # Reads go on, row locks wait.
            execute("LOCK TABLE tests_parcel IN EXCLUSIVE MODE", "other")

        with connected({"options": "-c lock_timeout=100ms"}):
            try:
                with before_statement(claims, lock):
                    report = run(wait_for_locked=0)
            finally:
                migration.__exit__(None, None, None)
            assert_run(report, processed=rehearsed, skipped=3 - rehearsed)
            assert_run(run(), processed=3 - rehearsed)
        assert calls == [0, 1, 2]

    @pytest.mark.parametrize("is_async", [False, True])
    @the.each_delivery
    def test_a_session_of_the_handlers_that_is_lost_costs_one_row(
        make: the.Make, is_async: bool
    ) -> None:
        the.errands(5)

        def handle(row: Errand) -> None:
            Errand.objects.using("other").count()
            if row.place == 1:
                end_session(connections["other"])
                Errand.objects.using("other").count()

        async def handle_async(row: Errand) -> None:
            await sync_to_async(handle)(row)

        assert_run(make(handle_async if is_async else handle)(), processed=4, failed=1)

    @the.all_deliveries
    def test_a_session_that_was_lost_before_the_run_is_replaced(make: the.Make) -> None:
        """And is not said to be in a transaction of the caller's."""
        the.errands(2)
        end_session()
        with pytest.raises(OperationalError):
            execute("SELECT 1")
        assert_run(make(the.ignore)(), processed=2)

    @the.each_delivery
    def test_a_handler_that_goes_on_without_its_lost_session_has_left_no_transaction(
        make: the.Make,
    ) -> None:
        the.errands(2)

        def handle(row: Errand) -> None:
            if row.place == 0:
                end_session()
                with suppress(OperationalError):
                    execute("SELECT 1")

        assert_run(make(handle)(), processed=2)


if MARIADB:

    def test_a_packet_that_is_too_large_costs_no_handler_call(
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """A statement for several rows has 200,000 characters of their values at most."""
        the.errands(12)
        calls: list[int] = []
        limit = "SET GLOBAL max_allowed_packet = {}".format
        with temporary(limit(2**20), limit(2**24)):
            connection.close()
            report = the.at_least_once(
                the.ignore,
                process_batch=lambda rows: calls.extend(row.place for row in rows),
                done=lambda row: {"done": True, "last_error": f"{row.place % 10}" * 500_000},
                batch_size=6,
            )()
        connection.close()
        assert_run(report, processed=12, redone=0)
        assert sorted(calls) == [*range(12)]
        told = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
        assert told == []


# --- a server that is away while rows are claimed and not yet handled


@dataclass
class Server:
    """Refuses so many of a session's attempts to connect, once it has gone away."""

    refuses: int = 0
    calls: list[int] = field(default_factory=list)
    called_meanwhile: list[int] = field(default_factory=list)

    def handle(self, row: Errand) -> None:
        if self.refuses:
            self.called_meanwhile.append(row.place)
        self.calls.append(row.place)
        if row.place == 0:
            self.refuses = 8
            end_session()

    def connect(self, params: Any) -> Any:
        if self.refuses:
            self.refuses -= 1
            raise OperationalError("no server")
        default = connections["default"]
        return type(default).get_new_connection(default, params)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    server = Server()
    connection.ensure_connection()
    monkeypatch.setattr(connections["default"], "get_new_connection", server.connect)
    return server


if HAS_SERVER:

    @the.all_deliveries
    def test_no_handler_is_called_until_it_is_back(make: the.Make, server: Server) -> None:
        the.errands(5)
        run = make(server.handle, batch_size=5, **the.retried(make))
        lost = int(make is the.transactional)  # with its transaction, the row whose handler ran
        assert_run(run(), processed=5 - lost, failed=lost, to_retry=lost)
        assert server.called_meanwhile == []
        assert server.calls == [*range(5)]
        done = Errand.objects.filter(done=True, attempts=0, leased_until=None)
        assert done.count() == 5 - lost

    @pytest.mark.parametrize("make", [the.transactional, the.at_least_once])
    def test_if_it_does_not_come_back_no_handler_is_called(make: the.Make, server: Server) -> None:
        the.errands(5)

        def handle(row: Errand) -> None:
            server.handle(row)
            server.refuses = 10**9

        options = {"lease": Lease(2)} if make is the.at_least_once else {}
        with pytest.raises(OperationalError, match="no server"):
            make(handle, batch_size=5, **options)()
        server.refuses = 0
        assert server.calls == [0]
        assert Errand.objects.filter(done=False, attempts=0).count() == 5
