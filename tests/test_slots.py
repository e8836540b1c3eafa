"""The slots of ``max_workers``: what PostgreSQL knows of them, and where they are refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.core import checks
from django.db import connection, connections
from django.db.utils import OperationalError

from dcl_processor import BatchProcessor, batch_processor
from dcl_processor.checks import databases
from dcl_processor.exceptions import Unsupported
from dcl_processor.locking import slots
from dcl_processor.locking.slots import Slot
from tests.contract.support.heartbeat import until
from tests.contract.support.sessions import connected, end_session
from tests.contract.support.slots import holders
from tests.edge.manage import alias
from tests.models import Parcel

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

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
            until(lambda: _is_ended(beside))
            assert slot.is_held()
            assert slot._connection.is_usable()
            assert len(holders(NAME, 3)) == 1
        finally:
            beside.close()
            slot.release()


def _is_ended(wrapper: Any) -> bool:
    with connection.cursor() as cursor:
        pid = wrapper.connection.info.backend_pid
        cursor.execute("SELECT 1 FROM pg_stat_activity WHERE pid = %s", [pid])
        return cursor.fetchone() is None


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
    with connected({"pool": {"min_size": 0, "max_size": 1}}) as wrapper:
        slot = Slot("default", NAME, 3)
        try:
            assert slot.take()
            with wrapper.cursor() as cursor:
                cursor.execute("SELECT 1")
        finally:
            slot.release()
            wrapper.close()
            wrapper.close_pool()  # type: ignore[attr-defined]  # PostgreSQL's


def capped(**options: Any) -> BatchProcessor[Parcel]:
    pending = Parcel.objects.filter(sent=False)
    make = batch_processor(pending=pending, done={"sent": True}, max_workers=2, **options)
    return make(lambda row: None)


WORDS = r"expected max_workers on PostgreSQL, MariaDB or MySQL, .*, got 'memory', which is SQLite"


def test_sqlite_is_refused_by_name() -> None:
    with alias("memory", ENGINE="django.db.backends.sqlite3", NAME=":memory:"):
        with pytest.raises(Unsupported, match=WORDS):
            Slot("memory", NAME, 1)
        connections["memory"].close()


def test_the_checks_find_a_database_without_such_locks() -> None:
    with alias("memory", ENGINE="django.db.backends.sqlite3", NAME=":memory:"):
        found = [
            each
            for each in databases.check("memory", [capped(using="memory")], ask=False)
            if isinstance(each, checks.Error)
        ]
    assert [each.id for each in found] == ["dcl_processor.E014"]
    assert list(databases.check("default", [capped()], ask=False)) == []


def test_a_galera_cluster_is_refused_by_name() -> None:
    slots.refuse_cluster({"wsrep_on": "OFF"}, "default", NAME)
    slots.refuse_cluster({}, "default", NAME)
    with pytest.raises(Unsupported, match="without Galera, got wsrep_on=ON on 'default'"):
        slots.refuse_cluster({"wsrep_on": "ON"}, "default", NAME)
