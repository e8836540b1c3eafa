"""A person who requeues rows in doubt: in groups, such a row keeps its place in its key.

A row is put back when nothing can call its handler any more: the worker that claimed it has ended,
or has begun another row since.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import django
import psutil

from . import audit, table
from .crew import CHECKOUT
from .server import Server

#: Seconds between two looks, and the least age of a claim that is looked at.
PAUSE, AGE = 0.3, 1.0


@contextmanager
def at_hand(server: Server, names: Sequence[str], folder: Path, lines: Path) -> Iterator[None]:
    """Have a person decide about the rows of the processors whose keys wait for that."""
    needed = [
        name
        for name in names
        if (terms := table.PROCESSORS[name]).most and terms.delivery == "at_most_once"
    ]
    if not needed:
        yield
        return
    path = folder / "person.log"
    with path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.person", *needed],
            env=table.environment(server, CHAOS_AUDIT=str(lines)),
            cwd=CHECKOUT,
            stdout=log,
            stderr=log,
        )
    try:
        yield
    finally:
        has_left = process.poll() is not None
        process.terminate()
        process.wait()
    if has_left:
        raise RuntimeError(f"expected the person to stay, got {path.read_text()}")


def main() -> None:
    django.setup()
    from django.db import Error, connections

    # An ordeal that is killed leaves no person behind.
    parent = os.getppid()
    while os.getppid() == parent:
        for name in sys.argv[1:]:
            # The server may be away for a while, or full.
            with suppress(Error):
                decide(name)
        connections.close_all()
        time.sleep(PAUSE)


def decide(name: str) -> None:
    from django.db import connection, transaction

    from . import processors

    processor = getattr(processors, name)
    of_table = processor.in_doubt(older_than=AGE)
    doubts = list(of_table.filter(place=table.PLACES[name]))
    latest = _latest() if doubts else {}
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


def _latest() -> dict[int, audit.Call]:
    """Return the latest call of each worker."""
    return {call.pid: call for call in audit.read(Path(os.environ["CHAOS_AUDIT"]))}


def _is_over(row: Any, latest: Mapping[int, audit.Call]) -> bool:
    pid, claimed = row.last_error.split()
    last = latest.get(int(pid))
    if last is not None and last.pk != row.pk and last.began > float(claimed):
        return True
    with suppress(psutil.Error):
        return bool(psutil.Process(int(pid)).status() == psutil.STATUS_ZOMBIE)
    return True


if __name__ == "__main__":
    main()
