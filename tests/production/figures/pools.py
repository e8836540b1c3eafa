"""Connections, and PgBouncer before them."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from functools import partial
from statistics import median
from typing import Any

from asgiref.sync import sync_to_async
from django.db import connections

from tests.production.figures.bench import ROUNDS, parcels, processor, say, seconds
from tests.servers.pgbouncer import pgbouncer


def measure_pgbouncer() -> None:
    """Handle rows with no work, directly and through PgBouncer."""
    direct = dict(connections["other"].settings_dict)
    times: dict[tuple[str, int], list[float]] = {}
    with (
        pgbouncer(direct, mode="session") as session,
        pgbouncer(direct, mode="transaction") as transaction,
    ):
        ways = {"direct": direct, "session": session, "transaction": transaction}
        for _ in range(ROUNDS):
            for name, settings in ways.items():
                for size in (1, 100):
                    rows = 1_000 if size == 1 else 10_000
                    parcels(rows, rows)
                    connections["other"].close()
                    connections["other"].settings_dict = settings
                    run = processor(batch_size=size)
                    took = seconds(partial(run.run, using="other"))
                    times.setdefault((name, size), []).append(took)
    connections["other"].close()
    connections["other"].settings_dict = direct
    for (name, size), each in times.items():
        say(
            f"rows/s, {name}, batch {size}, against directly",
            median(times["direct", size]) / median(each),
        )


def measure_connections() -> None:
    """Count the sessions of one copy while its handler is at work."""
    from dcl_processor import Delivery, Lease, batch_processor
    from tests.models import Errand
    from tests.ported.workers import renewed

    seen: list[int] = []
    count = (
        "SELECT count(*) FROM pg_stat_activity"
        " WHERE datname = current_database() AND backend_type = 'client backend'"
    )

    def look() -> None:
        with connections["other"].cursor() as cursor:
            cursor.execute(count)
            seen.append(cursor.fetchone()[0] - 1)

    def look_and_leave() -> None:
        look()
        connections["other"].close()

    def handler(row: Any) -> None:
        if row.leased_until is not None:
            renewed(row)
        look()

    async def handles(row: Any) -> None:
        await sync_to_async(renewed)(row)
        await sync_to_async(look_and_leave)()

    leased: dict[str, Any] = {
        "pending": Errand.objects.filter(done=False),
        "done": {"done": True},
        "delivery": Delivery.AT_LEAST_ONCE,
        "lease": Lease(timedelta(seconds=3)),
    }
    kinds = {
        "TRANSACTIONAL": batch_processor(
            pending=Errand.objects.filter(done=False), done={"done": True}
        )(handler),
        "AT_LEAST_ONCE": batch_processor(**leased)(handler),
        "AT_LEAST_ONCE, async, with queries in the handler": batch_processor(**leased)(handles),
    }
    for name, kind in kinds.items():
        Errand.objects.all().delete()
        Errand.objects.create()
        report = kind()
        assert report.processed == 1, report
        say(f"sessions of one copy, {name}", seen.pop(), "")
        connections.close_all()


def measure_pool_of_two() -> None:
    """Run eight workers with a handler of 20 ms over a pool of two connections."""
    from dcl_processor import Delivery, Lease, batch_processor
    from tests.models import Errand

    def handler(_: Any) -> None:
        time.sleep(0.02)

    base: dict[str, Any] = {"pending": Errand.objects.filter(done=False), "done": {"done": True}}
    leased: dict[str, Any] = {"delivery": Delivery.AT_LEAST_ONCE, "lease": Lease(60)}
    kinds = {
        "TRANSACTIONAL": batch_processor(**base)(handler),
        "AT_LEAST_ONCE": batch_processor(**base, **leased)(handler),
    }
    direct = dict(connections["other"].settings_dict)
    times: dict[tuple[str, str], list[float]] = {}
    with pgbouncer(direct, mode="transaction", default_pool_size=2) as pooled:
        for _ in range(3):
            for way, settings in (("direct", direct), ("pool", pooled)):
                connections["other"].close()
                connections.databases["other"] = settings
                for name, kind in kinds.items():
                    Errand.objects.all().delete()
                    Errand.objects.bulk_create(Errand() for _ in range(400))
                    times.setdefault((name, way), []).append(seconds(partial(_race, kind, 8)))
                    assert not Errand.objects.filter(done=False).exists()
    connections.databases["other"] = direct
    for name in kinds:
        rate = median(times[name, "direct"]) / median(times[name, "pool"])
        say(f"{name}: rows/s over a pool of 2, against a connection each", rate)


def _race(kind: Any, workers: int) -> None:
    def copy() -> None:
        kind.run(using="other")
        connections.close_all()

    threads = [threading.Thread(target=copy) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
