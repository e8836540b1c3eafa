"""Who holds the lock on a row, as PostgreSQL's tables show it, for each way to take it."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.core import checks
from django.db import connection
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import OperationalError

from dcl_processor import BatchProcessor, batch_processor
from dcl_processor.checks import check_database
from dcl_processor.exceptions import Unsupported
from dcl_processor.insights import row as rows
from dcl_processor.insights import rows as rows_
from dcl_processor.insights.answer import How
from dcl_processor.insights.locks import Holder, Locked, locked
from dcl_processor.insights.status import status
from dcl_processor.locking import slots
from dcl_processor.locking.slots import Slot
from dcl_processor.management import wording
from tests.contract.support import errands as the
from tests.contract.support.heartbeat import until
from tests.contract.support.parcels import processor
from tests.contract.support.sessions import connected, end_session, until_ended
from tests.contract.support.slots import holders
from tests.edge.manage import alias
from tests.models import Parcel, Scan
from tests.test_pools import pooled

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

RUN = processor(the.ignore)


class Session:
    """Another session, whose transactions end when the test says so."""

    def __init__(self, name: str) -> None:
        self._connection: BaseDatabaseWrapper = connection.copy()
        self._connection.settings_dict = {
            **connection.settings_dict,
            "OPTIONS": {**connection.settings_dict["OPTIONS"], "application_name": name},
        }
        self.name = name

    def execute(self, *statements: str) -> None:
        with self._connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)

    @property
    def pid(self) -> int:
        with self._connection.cursor() as cursor:
            cursor.execute("SELECT pg_backend_pid()")
            pid: int = cursor.fetchone()[0]
        return pid

    def close(self) -> None:
        self._connection.close()


@pytest.fixture
def session() -> Iterator[Callable[[str], Session]]:
    opened: list[Session] = []

    def open_session(name: str) -> Session:
        opened.append(Session(name))
        return opened[-1]

    yield open_session
    for each in opened:
        each.close()


Open = Callable[[str], Session]


def lock(parcel: Parcel, mode: str = "FOR UPDATE") -> str:
    return about(parcel, "SELECT 1 FROM tests_parcel WHERE id = :pk :mode").replace(":mode", mode)


def about(parcel: Parcel, statement: str) -> str:
    return statement.replace(":pk", str(parcel.pk))


def found(*parcels: Parcel) -> Locked:
    answer = locked(rows_.question_of(RUN, None), [parcel.pk for parcel in parcels])
    assert answer.value is not None
    return answer.value


def pids(holders: tuple[Holder, ...]) -> list[int | None]:
    return [holder.pid for holder in holders]


# --- the table


def test_the_holder_of_a_lock_in_an_outer_transaction_is_found(session: Open) -> None:
    parcel, free = Parcel.objects.create(), Parcel.objects.create()
    worker = session("worker 1/2")
    worker.execute("BEGIN", lock(parcel))
    assert found(free).holders == ()
    (holder,) = found(parcel, free).holders
    assert (holder.pid, holder.rows, holder.application_name) == (worker.pid, 1, "worker 1/2")
    assert holder.client == "local socket"
    assert holder.since is not None
    assert holder.query == lock(parcel)
    assert holder.state == "idle in transaction"
    assert holder.hidden == ()


def test_the_lock_of_a_released_savepoint_has_a_holder_without_a_name(session: Open) -> None:
    parcel = Parcel.objects.create()
    worker = session("worker")
    worker.execute("BEGIN", "SAVEPOINT a", lock(parcel))
    assert pids(found(parcel).holders) == [worker.pid]  # a savepoint has a number of its own
    worker.execute("RELEASE SAVEPOINT a")
    assert found(parcel) == Locked(1, (Holder(None),))
    worker.execute("ROLLBACK")
    assert found(parcel) == Locked(0, ())


def test_two_holders_of_one_row_are_both_found(session: Open) -> None:
    """An insert of a child row locks its parent, which keeps no worker from it."""
    parcel = Parcel.objects.create()
    worker, clerk = session("worker"), session("clerk")
    worker.execute("BEGIN", lock(parcel, "FOR NO KEY UPDATE"))
    clerk.execute(
        "BEGIN",
        about(parcel, "INSERT INTO tests_scan (parcel_id, ok) VALUES (:pk, true)"),
        "SET CONSTRAINTS ALL IMMEDIATE",
    )
    holders = {holder.pid: holder for holder in found(parcel).holders}
    assert {pid: holder.mode for pid, holder in holders.items()} == {
        worker.pid: "fornokeyupd",
        clerk.pid: "keysh",
    }
    assert [holders[each.pid].blocks for each in (worker, clerk)] == [True, False]
    assert found(parcel).rows == 1
    worker.execute("ROLLBACK")
    assert found(parcel).rows == 0
    assert pids(found(parcel).holders) == [clerk.pid]
    assert Scan.objects.count() == 0


def test_a_row_that_was_locked_has_no_holder(session: Open) -> None:
    """Its ``xmax`` stays as it was."""
    parcel = Parcel.objects.create()
    for end in ("COMMIT", "ROLLBACK"):
        worker = session("worker")
        worker.execute("BEGIN", lock(parcel), end)
        assert found(parcel) == Locked(0, ())


# --- what else may be in the way


def test_a_number_that_is_another_sessions_transaction_names_nobody(session: Open) -> None:
    """A multixact may have the number of a transaction that is open, and has locked no row here."""
    parcel = Parcel.objects.create()
    worker, stranger = session("worker"), session("stranger")
    worker.execute("BEGIN", lock(parcel))
    stranger.execute("BEGIN", "SELECT pg_current_xact_id()")
    with connection.cursor() as cursor:
        from dcl_processor.insights.locks import _HOLDERS

        cursor.execute(
            "SELECT transactionid::text::bigint FROM pg_locks"
            " WHERE pid = %s AND locktype = 'transactionid'",
            [stranger.pid],
        )
        number = cursor.fetchone()[0]
        cursor.execute(_HOLDERS, {"numbers": [number], "table": "tests_depot"})
        assert cursor.fetchall() == []
        cursor.execute(_HOLDERS, {"numbers": [number, 1, 4294967295], "table": "tests_parcel"})
        named = [pid for _, _, pid, *_ in cursor.fetchall() if pid is not None]
    assert named == []


@contextmanager
def as_role(name: str) -> Iterator[None]:
    """Work on the default connection with the rights of a role that may read the parcels."""
    with connection.cursor() as cursor:
        cursor.execute(f"CREATE ROLE {name}; GRANT SELECT ON tests_parcel TO {name}")
        cursor.execute(f"SET ROLE {name}")
    try:
        yield
    finally:
        with connection.cursor() as cursor:
            cursor.execute("RESET ROLE")
            cursor.execute(f"DROP OWNED BY {name}; DROP ROLE {name}")


def test_a_role_without_rights_sees_who_it_is_and_not_what_it_does(session: Open) -> None:
    parcel = Parcel.objects.create()
    worker = session("worker 1/2")
    worker.execute("BEGIN", lock(parcel))
    # Roles are the server's, which other runs of this test use at the same time.
    looker = f"dcl_looker_{secrets.token_hex(4)}"
    with as_role(looker):
        (holder,) = found(parcel).holders
        with connection.cursor() as cursor:
            cursor.execute(f"RESET ROLE; GRANT pg_read_all_stats TO {looker}; SET ROLE {looker}")
        (seen,) = found(parcel).holders
    assert (holder.pid, holder.application_name) == (worker.pid, "worker 1/2")
    assert holder.hidden == ("client", "since", "state", "query")
    assert (holder.query, holder.state, holder.since, holder.client) == (None, None, None, None)
    assert wording.holder(holder).endswith(
        " (client, since, state, query: not visible to this role; GRANT pg_read_all_stats TO it)"
    )
    assert (seen.hidden, seen.client, seen.state) == ((), "local socket", "idle in transaction")


def test_the_only_lock_of_a_row_may_be_that_of_a_foreign_key(session: Open) -> None:
    """PostgreSQL does not show its mode; a worker takes the row all the same."""
    parcel = Parcel.objects.create()
    other = session("web")
    other.execute("BEGIN", lock(parcel, "FOR KEY SHARE"))
    said = rows.show(RUN, parcel.pk).reason
    assert said == "a session has locked it, or has only inserted a row that refers to it"
    assert RUN(wait_for_locked=0).processed == 1


def test_with_more_pending_rows_than_are_looked_at_the_answer_is_at_least_so_many(
    session: Open,
) -> None:
    parcels = [Parcel.objects.create() for _ in range(3)]
    answer = status(RUN, only=["locked"], most=2).answers["locked"]
    assert answer.value is not None
    assert (answer.value.rows, answer.how) == (0, How.MORE_THAN)
    session("web").execute("BEGIN", lock(parcels[0]))
    answer = status(RUN, only=["locked"], most=2).answers["locked"]
    assert answer.value is not None
    assert (answer.value.rows, answer.how) == (1, How.MORE_THAN)
    assert status(RUN, only=["locked"], most=3).answers["locked"].how is How.EXACT


# --- the slots of ``max_workers``: what PostgreSQL knows of them, and where they are refused


NAME = "shop.capped"


@pytest.fixture
def slot() -> Iterator[Slot]:
    slot = Slot("default", NAME, 3)
    yield slot
    slot.release()


def activity(session: int) -> tuple[Any, ...]:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT state, backend_xmin, backend_xid FROM pg_stat_activity WHERE pid = %s",
            [session],
        )
        found: tuple[Any, ...] = cursor.fetchone()
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"server_side_binding": True, "prepare_threshold": 0},
        {"options": "-c default_transaction_isolation=serializable"},
        {"options": r"-c default_transaction_isolation=repeatable\ read"},
    ],
    ids=["plain", "server-side", "serializable", "repeatable read"],
)
def test_a_slot_does_not_hold_vacuum_back(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "ASK_EVERY", 0.0)
    with connected(options):
        slot = Slot("default", NAME, 3)
        try:
            assert slot.take()
            [session] = holders(NAME, 3)
            assert activity(session) == ("idle in transaction", None, None)
            assert slot.is_held()
            assert activity(session) == ("idle in transaction", None, None)
        finally:
            slot.release()


def test_a_slot_outlives_the_timeouts_of_its_role() -> None:
    """A session beside it, with the same timeouts, shows when they are over."""
    timeouts = "-c idle_in_transaction_session_timeout=700 -c transaction_timeout=700"
    with connected({"options": timeouts}) as wrapper:
        slot = Slot("default", NAME, 3)
        beside: Any = type(wrapper)(wrapper.settings_dict, "default")
        try:
            assert slot.take()
            with beside.cursor() as cursor:
                cursor.execute("BEGIN")
            until_ended(beside)
            assert slot.is_held()
            assert slot._connection.is_usable()
            assert len(holders(NAME, 3)) == 1
        finally:
            beside.close()
            slot.release()


def test_the_end_of_its_session_is_noticed_without_a_question(slot: Slot) -> None:
    assert slot.take()
    slot._ask_at = float("inf")  # the next question is far away
    assert slot.is_held()
    end_session(*holders(NAME, 3))
    until(lambda: not slot.is_held())
    assert not slot.is_held()
    assert slot.take()


def test_a_server_that_cannot_be_reached_is_an_error_and_not_a_taken_slot() -> None:
    with connected({}) as wrapper:
        before = wrapper.settings_dict["PORT"]
        slot = Slot("default", NAME, 3)
        wrapper.settings_dict["PORT"] = "1"
        try:
            with pytest.raises(OperationalError):
                slot.take()
        finally:
            wrapper.settings_dict["PORT"] = before


def test_a_slot_takes_no_connection_of_a_pool() -> None:
    with pooled(1):
        slot = Slot("default", NAME, 3)
        try:
            assert slot.take()
            with connection.cursor() as cursor:
                cursor.execute("SELECT 1")
        finally:
            slot.release()


def capped(**options: Any) -> BatchProcessor[Parcel]:
    pending = Parcel.objects.filter(sent=False)
    make = batch_processor(pending=pending, done={"sent": True}, max_workers=2, **options)
    return make(lambda row: None)


def test_the_checks_find_a_database_without_such_locks() -> None:
    with alias("memory", ENGINE="django.db.backends.sqlite3", NAME=":memory:"):
        found = [
            each
            for each in check_database("memory", [capped(using="memory")])
            if isinstance(each, checks.Error)
        ]
    assert [each.id for each in found] == ["dcl_processor.E014"]
    assert list(check_database("default", [capped()])) == []


def test_a_galera_cluster_is_refused_by_name() -> None:
    slots.refuse_cluster({"wsrep_on": "OFF"}, "default", NAME)
    slots.refuse_cluster({}, "default", NAME)
    with pytest.raises(Unsupported, match="without Galera, got wsrep_on=ON on 'default'"):
        slots.refuse_cluster({"wsrep_on": "ON"}, "default", NAME)
