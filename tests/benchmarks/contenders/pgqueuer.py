"""pgqueuer: its own manager on asyncpg, in the mode that ends when the queue is empty."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache

import asyncpg
import uvloop
from django.db import connection
from pgqueuer import PgQueuer
from pgqueuer.models import Job
from pgqueuer.types import QueueExecutionMode

from tests.benchmarks import handling
from tests.benchmarks.contenders import Drained
from tests.benchmarks.rows import settle_down


@asynccontextmanager
async def manager() -> AsyncIterator[PgQueuer]:
    given = connection.settings_dict
    driver = await asyncpg.connect(
        host=given["HOST"], port=given["PORT"], user=given["USER"], database=given["NAME"]
    )
    try:
        yield PgQueuer.from_asyncpg_connection(driver)
    finally:
        await driver.close()


@cache
def install() -> None:
    async def run() -> None:
        async with manager() as queue:
            await queue.qm.queries.install()

    asyncio.run(run())


def prepare(jobs: int) -> None:
    install()

    async def run() -> None:
        async with manager() as queue:
            payloads = [b"%d" % number for number in range(1, jobs + 1)]
            await queue.qm.queries.enqueue(["errand"] * jobs, payloads, [0] * jobs)

    with connection.cursor() as cursor:
        cursor.execute("TRUNCATE pgqueuer, pgqueuer_log, pgqueuer_statistics")
    asyncio.run(run())
    settle_down("pgqueuer", "pgqueuer_log")


def drain(*, batch_size: int) -> Drained:
    async def run() -> None:
        async with manager() as queue:

            @queue.entrypoint("errand")
            async def errand(job: Job) -> None:
                handling.handle(int(job.payload or b"0"))

            await queue.qm.run(batch_size=batch_size, mode=QueueExecutionMode.drain)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())
    return Drained()


def left() -> int:
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pgqueuer")
        return int(cursor.fetchone()[0])
