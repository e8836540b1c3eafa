"""Runs a loop in several workers at once."""

from __future__ import annotations

from collections.abc import Callable
from threading import Barrier, Thread
from time import monotonic, sleep
from typing import Any

from django.db import connections

from dcl_processor.columns import LeaseColumn

PATIENCE = 30.0  # seconds


def together(call: Callable[[], Any], workers: int = 3, patience: float = PATIENCE) -> None:
    """Call the loop in so many threads, which begin together; raise the first error of one.

    ``patience``: seconds for which each thread is waited for.
    """
    begin, errors = Barrier(workers), list[BaseException]()

    def work() -> None:
        try:
            begin.wait(PATIENCE)
            call()
        except BaseException as error:  # noqa: BLE001  # raised again below
            errors.append(error)
        finally:
            connections.close_all()

    threads = [Thread(target=work) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patience)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def renewed(row: LeaseColumn) -> None:
    """Return when the lease of the row is another one than that of the instance."""
    table, end = type(row)._default_manager, monotonic() + PATIENCE
    while table.filter(pk=row.pk, leased_until=row.leased_until).exists():
        assert monotonic() < end, "expected a lease to be renewed, and it never was"
        sleep(0.05)
