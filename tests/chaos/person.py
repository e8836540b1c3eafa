"""A person who requeues rows in doubt: in groups, such a row keeps its place in its key.

A row is put back when nothing can call its handler any more: the worker that claimed it has ended,
or has begun another row since.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import Any

import psutil
from django.db import Error, connection, connections, transaction

from . import audit, table

#: Seconds between two looks, and the least age of a claim that is looked at.
PAUSE, AGE = 0.3, 1.0


@contextmanager
def at_hand(names: Sequence[str], lines: Path) -> Iterator[None]:
    """Have a person decide about the rows of the processors whose keys wait for that."""
    needed = [
        name
        for name in names
        if (terms := table.PROCESSORS[name]).most and terms.delivery == "at_most_once"
    ]
    over = Event()
    with ThreadPoolExecutor(1) as pool:
        deciding = pool.submit(_decide, needed, lines, over)
        try:
            yield
        finally:
            over.set()
        deciding.result()


def _decide(names: Sequence[str], lines: Path, over: Event) -> None:
    while not over.wait(PAUSE):
        for name in names:
            # The server may be away for a while, or full.
            with suppress(Error):
                decide(name, lines)
        connections.close_all()


def decide(name: str, lines: Path) -> None:
    from . import processors  # which needs the models

    processor = getattr(processors, name)
    of_table = processor.in_doubt(older_than=AGE)
    doubts = list(of_table.filter(place=table.PLACES[name]))
    latest = {call.pid: call for call in audit.read(lines)} if doubts else {}
    for row in doubts:
        if not _is_over(row, latest):
            continue
        decided = time.monotonic()
        with transaction.atomic():
            # Not if the row was settled, or claimed again, meanwhile.
            same = of_table.filter(pk=row.pk, last_error=row.last_error)
            if processor.requeue(same, force=True):  # its worker is known to have ended
                with connection.cursor() as cursor:
                    cursor.execute(
                        "INSERT INTO chaos_decided VALUES (%s, %s, %s)",
                        [row.place, row.pk, decided],
                    )


def _is_over(row: Any, latest: Mapping[int, audit.Call]) -> bool:
    pid, claimed = row.last_error.split()
    last = latest.get(int(pid))
    if last is not None and last.pk != row.pk and last.began > float(claimed):
        return True
    with suppress(psutil.Error):
        return bool(psutil.Process(int(pid)).status() == psutil.STATUS_ZOMBIE)
    return True
