"""Errands in groups, by their place, and processors of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event
from typing import Any

import pytest

from dcl_processor import BatchProcessor, Report
from tests.contract.support.errands import (
    at_least_once,
    at_most_once,
    meanwhile,
    transactional,
    wait,
)
from tests.contract.support.gate import HAS_ROW_LOCKS
from tests.models import Errand

Make = Callable[..., BatchProcessor[Errand]]

SHORT_CLAIMS = ["at_most_once", "at_least_once"]
#: Those whose handler may be at work beside another one; without row locks a TRANSACTIONAL handler
#: locks the whole database.
each_at_work = pytest.mark.parametrize(
    "delivery", (["transactional"] if HAS_ROW_LOCKS else []) + SHORT_CLAIMS
)

MAKERS = {
    "transactional": transactional,
    "at_most_once": at_most_once,
    "at_least_once": at_least_once,
}


def rows_of(*places: int, **values: Any) -> list[Errand]:
    """Make an errand for each place given, in this order."""
    Errand.objects.bulk_create([Errand(place=place, **values) for place in places])
    return list(Errand.objects.order_by("pk"))


def grouped(delivery: str, handler: Callable[..., Any], **options: Any) -> BatchProcessor[Errand]:
    """Make a processor whose key is the place."""
    options = {"group_by": "place", **options}
    if delivery == "at_most_once":
        options.setdefault("done", {"done": True, "claimed": False})
    return MAKERS[delivery](handler, **options)


def in_order(delivery: str, handler: Callable[..., Any], **options: Any) -> BatchProcessor[Errand]:
    """Make a processor that keeps the order of each place."""
    return grouped(delivery, handler, in_order=True, **options)


@contextmanager
def at_work(make: Make, delivery: str, **run: Any) -> Iterator[list[int]]:
    """Have another worker in the handler of one row; yield the keys that it handled."""
    handled: list[int] = []
    here, go_on = Event(), Event()

    def handler(row: Errand) -> None:
        handled.append(row.pk)
        here.set()
        wait(go_on)

    given = {"limit": 1, "wait_for_locked": 0, **run}
    with meanwhile(lambda: make(delivery, handler)(**given)) as reports:
        try:
            wait(here)
            yield handled
        finally:
            go_on.set()
    assert isinstance(reports[0], Report), reports[0]
    assert reports[0].processed == 1, reports[0]


def run_beside(make: Make, delivery: str, **run: Any) -> tuple[Report, list[int]]:
    """Run a worker; return its report, and the keys of the rows it handled."""
    handled: list[int] = []
    processor = make(delivery, lambda row: handled.append(row.pk))
    return processor(**{"wait_for_locked": 0, **run}), handled
