"""Measure the figures on the page "Going to production".

python -m tests.production.figures [NAME…]

Each is a ratio of two things that are done in turn, several times over, on one PostgreSQL, in a
database of its own that is dropped afterwards. Medians are printed.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import django
from django.db import connection, connections

from tests.benchmarks import scratch
from tests.servers.pgbouncer import pgbouncer
from tests.servers.redis import redis
from tests.waiting import PATIENCE

ROUNDS = 5
Way = TypeVar("Way")


def in_turn(ways: Mapping[Way, Callable[[], float]], rounds: int = ROUNDS) -> dict[Way, float]:
    """Measure each way once in each round; return the median of each."""
    found: dict[Way, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, measure in ways.items():
            found[way].append(measure())
    return {way: median(each) for way, each in found.items()}


def seconds(do: Callable[[], Any]) -> float:
    start = time.perf_counter()
    do()
    return time.perf_counter() - start


def say(what: str, value: float) -> None:
    print(f"  {what}: {value:.3g}×", flush=True)


def statement(sql: str, *parameters: Any) -> Any:
    with connection.cursor() as cursor:
        cursor.execute(sql, parameters or None)
        return cursor.fetchall() if cursor.description else None


def parcels(total: int, pending: int) -> None:
    """Have so many parcels, of which the last are pending."""
    statement("TRUNCATE tests_parcel RESTART IDENTITY CASCADE")
    statement(
        "INSERT INTO tests_parcel (sent, tries, priority, note)"
        " SELECT n <= %s, 0, 0, repeat('x', 60) FROM generate_series(1, %s) n",
        total - pending,
        total,
    )
    statement("VACUUM (ANALYZE) tests_parcel")


def errands(number: int) -> list[int]:
    from tests.models import Errand

    Errand.objects.all().delete()
    return [row.pk for row in Errand.objects.bulk_create(Errand() for _ in range(number))]


def processor(handler: Callable[[Any], None] = lambda row: None, **options: Any) -> Any:
    from dcl_processor import batch_processor
    from tests.models import Parcel

    options = {"pending": Parcel.objects.filter(sent=False), "done": {"sent": True}, **options}
    return batch_processor(**options)(handler)


@contextmanager
def index() -> Iterator[None]:
    statement("CREATE INDEX waiting ON tests_parcel (id) WHERE NOT sent")
    statement("ANALYZE tests_parcel")
    try:
        yield
    finally:
        statement("DROP INDEX waiting")


# --- the table: its index, its flips, and what vacuum does for it


def measure_index() -> None:
    """Look at a million rows, of which none, or the last thousand, are pending."""
    for pending, what in ((0, "a run that finds nothing"), (1_000, "a run of 100 rows")):
        parcels(1_000_000, pending)

        def look(*, indexed: bool, limit: int = min(pending, 100)) -> float:
            with index() if indexed else nullcontext():
                return seconds(partial(processor().run, limit=limit))

        times = in_turn({indexed: partial(look, indexed=indexed) for indexed in (False, True)})
        say(f"{what}, without against with it", times[False] / times[True])
    with index():
        sizes = "SELECT pg_relation_size('waiting'), pg_relation_size('tests_parcel_pkey')"
        [(own, key)] = statement(sizes)
    say("size of the index, against that of the primary key", own / key)


def measure_flips() -> None:
    """Flip with the index, and without: with it no update is HOT."""
    hot: dict[bool, int] = {}

    def flip(*, indexed: bool) -> float:
        def all_flips() -> None:
            for pk in range(1, 2001):
                statement("UPDATE tests_parcel SET sent = true WHERE id = %s", pk)

        parcels(20_000, 20_000)
        with index() if indexed else nullcontext():
            before = _hot_updates()
            took = seconds(all_flips)
            hot[indexed] = _hot_updates() - before
        return took

    times = in_turn({indexed: partial(flip, indexed=indexed) for indexed in (False, True)})
    say("a flip with the index, against without", times[True] / times[False])
    print(f"  of 2000 flips, HOT: {hot[True]} with the index, {hot[False]} without")


def _hot_updates() -> int:
    statement("SELECT pg_stat_force_next_flush()")
    statement("SELECT 1")
    [(number,)] = statement(
        "SELECT n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'tests_parcel'"
    )
    return int(number)


def measure_vacuum() -> None:
    """Look after 100,000 flips that an old snapshot keeps from being cleaned up."""

    def dirty() -> float:
        parcels(200_000, 100_000)
        with connections["other"].cursor() as cursor:
            cursor.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            cursor.execute("SELECT 1")
            statement("UPDATE tests_parcel SET sent = true WHERE NOT sent")
            statement("VACUUM tests_parcel")
            took = median(seconds(processor()) for _ in range(ROUNDS))
            cursor.execute("ROLLBACK")
        return took

    def clean() -> float:
        statement("VACUUM tests_parcel")
        return median(seconds(processor()) for _ in range(ROUNDS))

    with index():
        times = in_turn({"dirty": dirty, "clean": clean}, rounds=3)
    say("a run that finds nothing, before VACUUM, against after", times["dirty"] / times["clean"])


# --- PgBouncer before the connections


def through(settings: dict[str, Any]) -> None:
    """Have the second alias connect in this way."""
    connections["other"].close()
    connections["other"].settings_dict = connections.databases["other"] = settings


def measure_pgbouncer() -> None:
    """Handle rows with no work, directly and through PgBouncer."""
    direct = dict(connections["other"].settings_dict)
    with (
        pgbouncer(direct, mode="session") as session,
        pgbouncer(direct, mode="transaction") as transaction,
    ):
        ways = {"direct": direct, "session": session, "transaction": transaction}

        def handle(way: str, size: int) -> float:
            rows = 1_000 if size == 1 else 10_000
            parcels(rows, rows)
            through(ways[way])
            return seconds(partial(processor(batch_size=size).run, using="other"))

        times = in_turn({(way, n): partial(handle, way, n) for way in ways for n in (1, 100)})
    through(direct)
    for (way, size), each in times.items():
        say(f"rows/s, {way}, batch {size}, against directly", times["direct", size] / each)


def measure_pool_of_two() -> None:
    """Run eight workers with a handler of 20 ms over a pool of two connections."""
    from dcl_processor import Delivery, Lease
    from tests.models import Errand

    base: dict[str, Any] = {"pending": Errand.objects.filter(done=False), "done": {"done": True}}
    leased: dict[str, Any] = {**base, "delivery": Delivery.AT_LEAST_ONCE, "lease": Lease(60)}
    kinds = {
        name: processor(lambda _: time.sleep(0.02), **options)
        for name, options in (("TRANSACTIONAL", base), ("AT_LEAST_ONCE", leased))
    }
    direct = dict(connections["other"].settings_dict)
    with pgbouncer(direct, mode="transaction", default_pool_size=2) as pooled:

        def handle(name: str, settings: dict[str, Any]) -> float:
            through(settings)
            errands(400)
            took = seconds(partial(_race, kinds[name], 8))
            assert not Errand.objects.filter(done=False).exists()
            return took

        ways = {"direct": direct, "pool": pooled}
        times = in_turn(
            {(name, way): partial(handle, name, ways[way]) for way in ways for name in kinds},
            rounds=3,
        )
    through(direct)
    for name in kinds:
        rate = times[name, "direct"] / times[name, "pool"]
        say(f"{name}: rows/s over a pool of 2, against a connection each", rate)


def _race(kind: Any, workers: int) -> None:
    def work() -> None:
        kind.run(using="other")
        connections.close_all()

    threads = [threading.Thread(target=work) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# --- several workers, and a broker's task for each row


_barriers: dict[int, Any] = {}


def _get_ready(barriers: dict[int, Any]) -> None:
    django.setup()
    _barriers.update(barriers)


def _work(number: int, seconds_each: float) -> float:
    run = processor(lambda row: time.sleep(seconds_each))
    _barriers[number].wait(PATIENCE)
    return float(run.run(wait_for_locked=0).duration)


def measure_workers() -> None:
    """Run several workers, by how long the handler waits for something else."""
    spawn = multiprocessing.get_context("spawn")
    numbers = (1, 2, 4, 8, 16)
    barriers = {number: spawn.Barrier(number) for number in numbers}
    with spawn.Pool(max(numbers), _get_ready, (barriers,)) as pool:
        for wait in (0.0, 0.005, 0.05):

            def handle(number: int, wait: float = wait) -> float:
                rows = 400 if wait < 0.05 else 25 * number
                parcels(rows, rows)
                took = pool.starmap(_work, [(number, wait)] * number, chunksize=1)
                return rows / max(took)

            rates = in_turn({number: partial(handle, number) for number in numbers}, rounds=3)
            for number in numbers[1:]:
                what = f"{number} workers, handler waits {1000 * wait:g} ms, against one"
                say(what, rates[number] / rates[1])


def measure_broker() -> None:
    """Handle five hundred rows in one run, and by one task for each, on one worker."""
    from tests.cluster.app import app
    from tests.cluster.processes import worker
    from tests.models import Errand

    def wait_until_done() -> None:
        while Errand.objects.filter(done=False).exists():
            time.sleep(0.005)

    def tasks() -> float:
        def send() -> None:
            for pk in keys:
                app.send_task("cluster.one", (pk,), ignore_result=True)
            wait_until_done()

        keys = errands(500)
        return seconds(send)

    def run() -> float:
        def send() -> None:
            app.send_task("dcl_processor.run", ("cluster.deliver",))
            wait_until_done()

        errands(500)
        return seconds(send)

    with tempfile.TemporaryDirectory() as name, redis() as url:
        app.conf.broker_url = app.conf.result_backend = url
        variables = {"REDIS_URL": url, "AUDIT": f"{name}/audit"}
        with worker(Path(name), "one", variables=variables, size=1):
            run()
            times = in_turn({"tasks": tasks, "run": run})
    say("rows/s of one run, against a task for each", times["tasks"] / times["run"])


FIGURES: dict[str, Callable[[], None]] = {
    "index": measure_index,
    "flips": measure_flips,
    "vacuum": measure_vacuum,
    "pgbouncer": measure_pgbouncer,
    "pool": measure_pool_of_two,
    "workers": measure_workers,
    "broker": measure_broker,
}


def main(names: list[str]) -> None:
    with scratch.database(fsync=False):
        os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
        django.setup()
        from django.core.management import call_command

        call_command("migrate", run_syncdb=True, verbosity=0)
        for name in names or FIGURES:
            print(f"{name}: {FIGURES[name].__doc__}")
            FIGURES[name]()
        connections.close_all()


if __name__ == "__main__":
    main(sys.argv[1:])
