"""The table: its index, its flips, and what vacuum does for it."""

from __future__ import annotations

from functools import partial
from statistics import median

from django.db import connections

from tests.production.figures.bench import (
    ROUNDS,
    index,
    nothing,
    parcels,
    processor,
    say,
    seconds,
    statement,
)


def _plan() -> str:
    from django.db import connection
    from django.test.utils import CaptureQueriesContext

    with CaptureQueriesContext(connection) as queries:
        processor().run(limit=1)
    looks = [each["sql"] for each in queries if each["sql"].startswith("SELECT")]
    return "\n".join(
        row[0] for row in statement(f"EXPLAIN (ANALYZE, COSTS OFF, SUMMARY OFF) {looks[0]}")
    )


def measure_index() -> None:
    """Look at a million rows, of which none, or the last thousand, are pending."""
    for pending, what in ((0, "a run that finds nothing"), (1_000, "a run of 100 rows")):
        parcels(1_000_000, pending)
        times: dict[bool, list[float]] = {False: [], True: []}
        for each in range(ROUNDS):
            for indexed in (False, True):
                with index() if indexed else nothing():
                    if each == 0:
                        print(f"--- {pending} pending, {'with' if indexed else 'without'} index")
                        print(_plan())
                    look, limit = processor(), min(pending, 100)
                    times[indexed].append(seconds(partial(look.run, limit=limit)))
        say(f"{what}, without against with it", median(times[False]) / median(times[True]))
    with index():
        sizes = "SELECT pg_relation_size('waiting'), pg_relation_size('tests_parcel_pkey')"
        [(own, key)] = statement(sizes)
    say("size of the index, against that of the primary key", own / key)


def measure_flips() -> None:
    """Flip with the index, and without: with it no update is HOT."""
    times: dict[bool, list[float]] = {False: [], True: []}
    hot: dict[bool, int] = {}
    flip = "UPDATE tests_parcel SET sent = true WHERE id = %s"
    for _ in range(ROUNDS):
        for indexed in (False, True):
            parcels(20_000, 20_000)
            with index() if indexed else nothing():
                before = _hot_updates()

                def all_flips() -> None:
                    for pk in range(1, 2001):
                        statement(flip, pk)

                times[indexed].append(seconds(all_flips))
                hot[indexed] = _hot_updates() - before
    say("a flip with the index, against without", median(times[True]) / median(times[False]))
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
    dirty: list[float] = []
    clean: list[float] = []
    with index():
        for _ in range(3):
            parcels(200_000, 100_000)
            with connections["other"].cursor() as cursor:
                cursor.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
                cursor.execute("SELECT 1")
                statement("UPDATE tests_parcel SET sent = true WHERE NOT sent")
                statement("VACUUM tests_parcel")
                dirty += [seconds(processor()) for _ in range(ROUNDS)]
                cursor.execute("ROLLBACK")
            statement("VACUUM tests_parcel")
            clean += [seconds(processor()) for _ in range(ROUNDS)]
    say("a run that finds nothing, before VACUUM, against after", median(dirty) / median(clean))
