"""Runs a loop in several workers at once."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import Any

from django.db import connections

from dcl_processor.columns import LeaseColumn
from tests.waiting import Barrier, join, until


def together(call: Callable[[], Any], workers: int = 3) -> None:
    """Call the loop in so many threads, which begin together; raise the first error of one."""
    begin, errors = Barrier(workers), list[BaseException]()

    def work() -> None:
        try:
            begin.wait()
            call()
        except BaseException as error:  # noqa: BLE001  # raised again below
            errors.append(error)
        finally:
            connections.close_all()

    threads = [Thread(target=work) for _ in range(workers)]
    for thread in threads:
        thread.start()
    join(*threads)
    if errors:
        raise errors[0]


def renewed(row: LeaseColumn) -> None:
    """Return when the lease of the row is another one than that of the instance."""
    same = type(row)._default_manager.filter(pk=row.pk, leased_until=row.leased_until)
    until(lambda: not same.exists(), "the lease to be renewed", pause=0.05)
