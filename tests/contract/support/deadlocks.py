"""A deadlock that the session under test loses, forced with a second session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event

from django.db import connection, connections, transaction

from tests.contract.support.errands import meanwhile
from tests.contract.support.temporary import execute
from tests.models import Depot, Tag
from tests.waiting import until, wait

HEAVY = 500  # rows that the other session has written; InnoDB ends the one that wrote less

WAITING = {
    "postgresql": "SELECT COUNT(*) FROM pg_stat_activity"
    " WHERE datname = current_database() AND wait_event_type = 'Lock'",
    # innodb_trx is a copy, which is made again only when it was not read for 0.1 seconds.
    "mysql": "SELECT variable_value FROM information_schema.global_status"
    " WHERE variable_name = 'innodb_row_lock_current_waits'",
}


@contextmanager
def deadlock() -> Iterator[Callable[[], None]]:
    """Yield a function that gets the default connection into a deadlock, and raises its error."""
    ours, theirs = Depot.objects.create(name="ours"), Depot.objects.create(name="theirs")
    holds, go = Event(), Event()

    def other() -> None:
        with transaction.atomic(using="other"):
            if connection.vendor == "postgresql":
                # It ends the session that looks for the deadlock first.
                execute("SET LOCAL deadlock_timeout = '60s'", "other")
            Tag.objects.using("other").bulk_create([Tag(name="heavy") for _ in range(HEAVY)])
            Depot.objects.using("other").filter(pk=theirs.pk).update(name="other")
            holds.set()
            wait(go)
            Depot.objects.using("other").filter(pk=ours.pk).update(name="other")

    def run_into_it() -> None:
        Depot.objects.filter(pk=ours.pk).update(name="default")
        go.set()
        wait_until_a_session_waits()
        Depot.objects.filter(pk=theirs.pk).update(name="default")

    with meanwhile(other) as results:
        try:
            wait(holds)
            yield run_into_it
        finally:
            go.set()
    assert results == [None], results
    assert set(Depot.objects.values_list("name", flat=True)) == {"other"}


def a_session_waits() -> bool:
    """Say whether a session of the test database, or of MariaDB's server, waits for a lock."""
    with connections["other"].cursor() as cursor:
        cursor.execute(WAITING[connection.vendor])
        return int(cursor.fetchone()[0]) > 0


def wait_until_a_session_waits() -> None:
    until(a_session_waits, "a session to wait for a lock")
