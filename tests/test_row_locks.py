"""Who holds the lock on a row, as PostgreSQL's tables show it, for each way to take it."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from django.db import connection
from django.db.backends.base.base import BaseDatabaseWrapper

from dcl_processor.insights.locks import _HOLDERS, holders
from dcl_processor.insights.row import show
from dcl_processor.operator.backlog import question_of
from tests.contract.support import errands as the
from tests.contract.support.parcels import processor
from tests.models import Parcel, Scan

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


def found(parcel: Parcel) -> tuple[str, ...]:
    answer = holders(question_of(RUN, None), parcel.pk)
    assert answer.value is not None
    return answer.value


def pid(session: Session) -> str:
    return f"pid {session.pid}, {session.name}, role "


# --- the table


def test_the_holder_of_a_lock_in_an_outer_transaction_is_found(session: Open) -> None:
    parcel, free = Parcel.objects.create(), Parcel.objects.create()
    worker = session("worker 1/2")
    worker.execute("BEGIN", lock(parcel))
    assert found(free) == ()
    (holder,) = found(parcel)
    assert holder.startswith(pid(worker))
    assert ", local socket, since " in holder
    assert holder.endswith(f" UTC, idle in transaction, {lock(parcel)}")


def test_the_lock_of_a_released_savepoint_has_a_holder_without_a_name(session: Open) -> None:
    parcel = Parcel.objects.create()
    worker = session("worker")
    worker.execute("BEGIN", "SAVEPOINT a", lock(parcel))
    (holder,) = found(parcel)
    assert holder.startswith(pid(worker))  # a savepoint has a number of its own
    worker.execute("RELEASE SAVEPOINT a")
    assert found(parcel) == ("a session that PostgreSQL does not name",)
    worker.execute("ROLLBACK")
    assert found(parcel) == ()


def test_the_lock_of_a_foreign_keys_check_is_left_out(session: Open) -> None:
    """An insert of a child row locks its parent, which keeps no worker from it."""
    parcel = Parcel.objects.create()
    worker, clerk = session("worker"), session("clerk")
    worker.execute("BEGIN", lock(parcel, "FOR NO KEY UPDATE"))
    clerk.execute(
        "BEGIN",
        about(parcel, "INSERT INTO tests_scan (parcel_id, ok) VALUES (:pk, true)"),
        "SET CONSTRAINTS ALL IMMEDIATE",
    )
    (holder,) = found(parcel)
    assert holder.startswith(pid(worker))
    worker.execute("ROLLBACK")
    assert found(parcel) == ()
    assert Scan.objects.count() == 0


def test_a_row_that_was_locked_has_no_holder(session: Open) -> None:
    """Its ``xmax`` stays as it was."""
    parcel = Parcel.objects.create()
    for end in ("COMMIT", "ROLLBACK"):
        worker = session("worker")
        worker.execute("BEGIN", lock(parcel), end)
        assert found(parcel) == ()


# --- what else may be in the way


def test_a_number_that_is_another_sessions_transaction_names_nobody(session: Open) -> None:
    """A multixact may have the number of a transaction that is open, and has locked no row here."""
    parcel = Parcel.objects.create()
    worker, stranger = session("worker"), session("stranger")
    worker.execute("BEGIN", lock(parcel))
    stranger.execute("BEGIN", "SELECT pg_current_xact_id()")
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT transactionid::text::bigint FROM pg_locks"
            " WHERE pid = %s AND locktype = 'transactionid'",
            [stranger.pid],
        )
        number = cursor.fetchone()[0]
        for table in ("tests_depot", "tests_parcel"):
            cursor.execute(_HOLDERS, {"number": number, "table": table})
            assert [pid for pid, *_ in cursor.fetchall() if pid is not None] == []


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
        (holder,) = found(parcel)
        with connection.cursor() as cursor:
            cursor.execute(f"RESET ROLE; GRANT pg_read_all_stats TO {looker}; SET ROLE {looker}")
        (seen,) = found(parcel)
    hidden = " (the rest is hidden from this role; GRANT pg_read_all_stats to it)"
    assert holder.startswith(pid(worker))
    assert holder.endswith(hidden)
    assert lock(parcel) not in holder
    assert ", local socket, since " in seen
    assert ", idle in transaction, " in seen


def test_the_only_lock_of_a_row_may_be_that_of_a_foreign_key(session: Open) -> None:
    """PostgreSQL does not show its mode; a worker takes the row all the same."""
    parcel = Parcel.objects.create()
    other = session("web")
    other.execute("BEGIN", lock(parcel, "FOR KEY SHARE"))
    row = show(RUN, parcel.pk).value
    assert row is not None
    assert row.reason == "a session has locked it, or has only inserted a row that refers to it"
    assert RUN(wait_for_locked=0).processed == 1
