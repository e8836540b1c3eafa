"""``--listen``: a watcher that wake() wakes, and that misses nothing for good."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from django.db import connection

from dcl_processor.workers.notify import Listener
from tests.contract.support.sessions import end_session
from tests.edge.manage import processors
from tests.edge.watchers import SELDOM, Watcher, parcels, wait_until_sent, watching
from tests.waiting import until
from tests.warehouse.processors import deliver

pytestmark = pytest.mark.django_db(transaction=True)

LISTENING = ("warehouse.deliver", "--watch", SELDOM, "--listen")


def test_a_channel_that_another_client_of_a_pooler_has_asked_for_is_passed_over(
    installed: None,
) -> None:
    with closing(Listener("default", {"dcl_ours": "deliver"})) as listener:
        listener.poll()
        assert listener._wrapper is not None
        with listener._wrapper.cursor() as cursor:
            cursor.execute("LISTEN dcl_theirs")
        with connection.cursor() as cursor:
            cursor.execute("NOTIFY dcl_theirs")
            cursor.execute("NOTIFY dcl_ours")
        until(lambda: listener.poll() == {"deliver"}, "the notification")


@pytest.fixture
def watcher(installed: None) -> Iterator[Watcher]:
    """Start a watcher that looks so seldom that only wake() can make it."""
    parcels("")
    with watching(*LISTENING) as watcher:
        watcher.says("warehouse.deliver: 1 processed in ")
        yield watcher


def wake_for_a_row() -> None:
    """Wait until a row has been handled that only a notification tells of."""
    parcels("")
    deliver.wake()
    wait_until_sent()


def listeners() -> list[int]:
    """Return the sessions that listen."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database() "
            "AND query LIKE 'LISTEN%'"
        )
        return [pid for (pid,) in cursor.fetchall()]


def test_wake_starts_the_handler_at_once(watcher: Watcher) -> None:
    """Each time, although the next look is in ten minutes."""
    for _ in range(25):
        wake_for_a_row()


def test_a_listener_that_is_lost_looks_and_listens_again(watcher: Watcher) -> None:
    (before,) = listeners()
    parcels("")  # no listener is woken: it is found because the connection goes
    end_session(before)
    wait_until_sent()
    until(lambda: listeners() not in ([], [before]), "another one that listens")
    wake_for_a_row()
    code, _, err = watcher.end()
    assert (code, err) == (0, "")
    # One line, whatever is configured: who waits for wake() waits for nothing meanwhile.
    [said] = watcher.operations
    assert said.startswith("LISTEN failed on 'default', and rows are found by polling")


def test_listening_where_nobody_can_is_refused(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'db'}"
    done = processors("run", "warehouse.deliver", "--watch", "--listen", DATABASE_URL=url)
    assert (done.returncode, done.stdout) == (2, "")
    (sentence,) = done.stderr.splitlines()
    assert sentence.startswith("CommandError: expected PostgreSQL with psycopg 3 for every")


def test_a_processor_that_cannot_be_asked_keeps_nobody_from_listening() -> None:
    names = ("faulty.slice_off", "warehouse.deliver")
    settings = "tests.faulty.settings"
    parcels("")
    with watching(*names, *LISTENING[1:], DJANGO_SETTINGS_MODULE=settings) as watcher:
        watcher.says("faulty.slice_off: expected pending to be a queryset", err=True)
        watcher.says("warehouse.deliver: 1 processed in ")
        assert watcher.end()[:2] == (1, "")
