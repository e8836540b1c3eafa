"""Rows with retry columns of an existing project, and processors of them for each delivery."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dcl_processor import BatchProcessor, Delivery, Lease, Retry, batch_processor
from tests.models import Dispatch

PENDING = Dispatch.objects.filter(status__in=["queued", "deferred"])

Make = Callable[..., BatchProcessor[Dispatch]]


def dispatches(number: int, **values: Any) -> list[Dispatch]:
    """Make rows whose ``place`` is their place; return all that there are."""
    Dispatch.objects.bulk_create([Dispatch(place=place, **values) for place in range(number)])
    return list(Dispatch.objects.order_by("place"))


def transactional(handler: Callable[..., Any], **options: Any) -> BatchProcessor[Dispatch]:
    """Make a processor of the queued and the deferred rows."""
    options = {"pending": PENDING, "done": {"status": "sent"}, **options}
    return batch_processor(**options)(handler)


def at_most_once(handler: Callable[..., Any], **options: Any) -> BatchProcessor[Dispatch]:
    claim = {"claim": {"status": "sending"}, "claimed_at": "claimed_at"}
    reset = {"reset": {"status": "queued"}}
    options = {"delivery": Delivery.AT_MOST_ONCE, **claim, **reset, **options}
    return transactional(handler, **options)


def at_least_once(handler: Callable[..., Any], **options: Any) -> BatchProcessor[Dispatch]:
    options = {"delivery": Delivery.AT_LEAST_ONCE, "lease": Lease(60), **options}
    return transactional(handler, **options)


each_way = pytest.mark.parametrize("make", [transactional, at_most_once, at_least_once])


def retry(max_attempts: int | None = 3, **options: Any) -> Retry:
    """Return a ``Retry`` on a nullable counter of two bytes, and without a time or an error."""
    columns = {"attempts": "tries", "next_attempt_at": None, "last_error": None}
    return Retry(max_attempts, **{**columns, **options})


def column(name: str) -> list[Any]:
    """Return the values of a column by the rows' places."""
    return list(Dispatch.objects.order_by("place").values_list(name, flat=True))


def always_fails(row: Dispatch) -> None:
    raise OSError("no answer")


class Calls:
    """Counts by place how often its handler was called, which always fails."""

    def __init__(self) -> None:
        self.places: list[int] = []

    def handler(self) -> Callable[[Dispatch], None]:
        """Return a function, which a processor is named after."""

        def send(row: Dispatch) -> None:
            self.places.append(row.place)
            always_fails(row)

        return send
