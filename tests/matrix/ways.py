"""A processor for each cell, and one run of it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from django.db import connection
from django.db.models import Exists, OuterRef, Q, QuerySet

from dcl_processor import Lease, Report, Retry, batch_processor
from tests.models import Errand
from tests.waiting import until

from .cells import LEAST, TIMES, Cell
from .faults import ASKED, fired

ATTEMPTS = 3


class Subject:
    """The processor of a cell, and how often its handler was called for each place."""

    def __init__(self, cell: Cell) -> None:
        self.cell, self.calls = cell, Counter[int]()
        self.processor = batch_processor(**self._options())(self._handler())

    def run(self) -> Report:
        options: dict[str, Any] = {"concurrency": 3} if self.cell.way == "threads" else {}
        if self.cell.lasts:
            options["wait_for_locked"] = 0
        # Where other code looks at each statement, each is a message of its own.
        watching = connection.execute_wrapper(lambda execute, *rest: execute(*rest))
        with watching if self.cell.way == "watched" else nullcontext():
            report = self.processor.run(**options)
        assert report.stopped == "drained", report
        assert report.failed == len(report.failures)
        return report

    def _handle(self, row: Errand) -> None:
        cell = self.cell
        self.calls[row.place] += 1
        if cell.stage == "renewal" and row.place == cell.place:
            enough = 2 if cell.lasts else TIMES + 1
            until(lambda: fired() >= enough, "the heartbeat to try again")
        if cell.fails and row.place == cell.place:
            raise ValueError("no such place")

    def _handler(self) -> Callable[..., Any]:
        async def handle_async(row: Errand) -> None:
            await asyncio.to_thread(self._handle, row)

        return handle_async if self.cell.way == "async" else self._handle

    def _result(self, row: Errand) -> Any:
        try:
            self._handle(row)
        except ValueError as error:
            return error
        return None

    def _pending(self) -> QuerySet[Errand]:
        cell, rows = self.cell, Errand.objects.filter(dead=False)
        free = Q(claimed=False)
        if cell.has_claim and cell.delivery == LEAST:
            free |= Q(claimed=True, leased_until__isnull=False)
        rows = rows.filter(free)
        if cell.stage in ASKED:
            return rows.extra(where=["tests_pending(tests_errand.place, tests_errand.done)"])
        rows = rows.filter(done=False)
        if cell.way == "two statements":
            rows = rows.filter(Exists(Errand.objects.filter(pk=OuterRef("pk"), done=False)))
        return rows

    def _options(self) -> dict[str, Any]:
        cell = self.cell
        done: dict[str, Any] = {"done": True}
        options: dict[str, Any] = {
            "name": "tests.matrix",
            "pending": self._pending,
            "delivery": cell.delivery,
            "failed": {"dead": True},
            "batch_size": 1 if cell.way in ("one by one", "threads", "async") else 10,
        }
        if cell.has_claim:
            done["claimed"] = False
            options |= {"claim": {"claimed": True}, "claimed_at": "claimed_at"}
            options |= {"reset": {"claimed": False}}
        if cell.delivery == LEAST:
            options["lease"] = Lease(60)
        if cell.retries:
            options["retry"] = Retry(ATTEMPTS, backoff=0, jitter=0)
        if cell.way == "async":
            options["concurrency"] = 3
        if cell.way == "groups":
            options["group_by"] = "place"
        if cell.way == "bulk":
            options["process_batch"] = lambda rows: [*map(self._result, rows)]
        # Values of their own: such rows share a statement, and are looked at afterwards.
        own = cell.way == "bulk" or cell.stage == "look"
        return {
            **options,
            "done": (lambda row: {**done, "result": str(row.place)}) if own else done,
        }
