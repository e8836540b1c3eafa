"""Runs a loop in several workers at once."""

from __future__ import annotations

from collections.abc import Callable
from threading import Barrier, Thread
from typing import Any

from django.db import connections

PATIENCE = 30.0  # seconds


def together(call: Callable[[], Any], workers: int = 3) -> None:
    """Call the loop in so many threads, which begin together; raise the first error of one."""
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
        thread.join(PATIENCE)
        assert not thread.is_alive()
    if errors:
        raise errors[0]
