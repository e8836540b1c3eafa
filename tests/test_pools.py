"""Django's connection pool: what a run takes of it, and that it waits for none without end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import connection, connections

from dcl_processor import Lease
from dcl_processor.engine import heartbeat
from dcl_processor.exceptions import Unsupported
from dcl_processor.workers.notify import Listener
from tests.contract.support import errands as the
from tests.contract.support.heartbeat import beat_soon
from tests.contract.support.reports import assert_run
from tests.contract.support.sessions import connected
from tests.models import Errand
from tests.waiting import until

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


@contextmanager
def pooled(size: int, **options: Any) -> Iterator[Any]:
    """Let the default alias have a pool of so many connections."""
    with connected({"pool": {"min_size": 0, "max_size": size, **options}}) as wrapper:
        pool: Any = wrapper.pool  # type: ignore[attr-defined]  # PostgreSQL's
        try:
            yield pool
        finally:
            wrapper.close()
            wrapper.close_pool()  # type: ignore[attr-defined]  # likewise


RUNS: dict[str, tuple[Any, int, int]] = {
    "one by one": (the.transactional, 1, 1),
    "a lease": (the.at_least_once, 1, 2),
    "threads": (the.at_most_once, 3, 4),
    "threads and a lease": (the.at_least_once, 3, 5),
    # The handlers, which query, have a thread of their own beside that of the run.
    "async, one by one": (the.at_most_once, 1, 2),
    "async and a lease": (the.at_least_once, 1, 3),
    "async tasks and a lease": (the.at_least_once, 3, 3),
}


@pytest.mark.parametrize("kind", RUNS)
def test_a_pool_without_room_for_the_run_is_refused(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, concurrency, needed = RUNS[kind]
    beat_soon(monkeypatch)
    rows = the.errands(1 + 2 * concurrency)
    calls: list[int] = []
    together = threading.Barrier(concurrency, timeout=the.PATIENCE)

    def handle(row: Errand) -> None:
        calls.append(row.pk)
        # The first is alone, since the flip is rehearsed with it.
        if len(calls) > 1:
            together.wait()
            time.sleep(0.5)  # for a renewal

    async def handle_async(row: Errand) -> None:
        await Errand.objects.aget(pk=row.pk)
        calls.append(row.pk)

    run = make(handle_async if kind.startswith("async") else handle)
    if needed > 1:
        with pooled(needed - 1, timeout=5):
            sentence = f"room for {needed} connections, one for the run.* got max_size={needed - 1}"
            with pytest.raises(Unsupported, match=sentence):
                run(concurrency=concurrency)
        assert calls == []
    with pooled(needed, timeout=5) as pool:
        report = run(concurrency=concurrency)
        assert_run(report, processed=len(rows))
        connection.close()
        stats = pool.get_stats()
        assert stats["pool_size"] == stats["pool_available"] <= needed


def test_a_listener_takes_no_connection_of_the_pool() -> None:
    the.errands(1)
    with pooled(1, timeout=5) as pool:
        listener = Listener("default", {"errands": "errands"})
        assert listener.poll() == {"errands"}
        assert_run(the.transactional(lambda row: None)(), processed=1)
        listener.close()
        connection.close()
        assert pool.get_stats()["pool_size"] == 1


def test_the_end_of_a_run_waits_for_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread of the process may have the one that the heartbeat would take."""
    monkeypatch.setattr(heartbeat, "CLOSING", 0.2)
    beat_soon(monkeypatch)
    the.errands(1)
    with pooled(2, timeout=20) as pool:
        other = connections.create_connection("default")
        connection.ensure_connection()
        other.ensure_connection()  # before the run, or the heartbeat might be first

        def handle(row: Errand) -> None:
            until(lambda: pool.get_stats()["requests_waiting"] > 0)

        began = time.monotonic()
        report = the.at_least_once(handle, lease=Lease(60))()
        assert_run(report, processed=1)
        assert time.monotonic() - began < 10
        other.close()
        until(lambda: not the.our_threads())
