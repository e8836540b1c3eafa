"""Parcels, processors of them, what handlers wrote to them, and what was sent meanwhile."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from django.db import connection

from dcl_processor import BatchProcessor, batch_processor
from tests.contract.support.messages import separately
from tests.models import Parcel

UNSENT = Parcel.objects.filter(sent=False)


def parcels(number: int, **columns: Any) -> list[Parcel]:
    """Make parcels whose ``priority`` is their place, unless told otherwise."""
    rows = [Parcel(**{"priority": place, **columns}) for place in range(number)]
    return Parcel.objects.bulk_create(rows)


def processor(handler: Callable[..., Any], **options: Any) -> BatchProcessor[Parcel]:
    """Make a processor of the parcels that are not sent, one by one unless told otherwise."""
    options = {"pending": UNSENT, "done": {"sent": True}, **options}
    return batch_processor(**options)(handler)


def in_batches(handler: Callable[..., Any], **options: Any) -> BatchProcessor[Parcel]:
    """Make a processor of all parcels in one batch, unless told otherwise."""
    return processor(handler, **{"batch_size": 100, **options})


def note(row: Parcel, text: str = "worked") -> None:
    """Work in the database, as a handler would."""
    assert Parcel.objects.filter(pk=row.pk).update(note=text) == 1


def sent() -> list[int]:
    """Return the places of the parcels that were flipped."""
    return _places(sent=True)


def worked() -> list[int]:
    """Return the places of the parcels whose handler's work was kept."""
    return _places(note="worked")


def _places(**values: Any) -> list[int]:
    return sorted(Parcel.objects.filter(**values).values_list("priority", flat=True))


@contextmanager
def statements() -> Iterator[list[str]]:
    """Yield the statements that are sent meanwhile, BEGIN and COMMIT excepted."""
    seen: list[str] = []

    def wrapper(execute: Callable[..., Any], sql: str, *args: Any) -> Any:
        if sql not in ("BEGIN ISOLATION LEVEL READ COMMITTED", "COMMIT"):
            seen.append(sql)
        return execute(sql, *args)

    with separately(), connection.execute_wrapper(wrapper):
        yield seen


def savepoints(seen: list[str]) -> list[str]:
    """Return those of the statements that begin a row's savepoint."""
    return [sql for sql in seen if sql.startswith("SAVEPOINT") and "dcl_row" in sql]


def flips(seen: list[str]) -> list[str]:
    """Return the statements that write a flip, and were not rolled back as its trial is."""
    found, before = list[str](), 0
    for sql in seen:
        if sql.startswith("SAVEPOINT"):
            before = len(found)
        elif sql.startswith("ROLLBACK TO"):
            del found[before:]
        elif re.match(r"(WITH \w+( \(\w+\))? AS \()?UPDATE .* SET .*sent.* WHERE", sql):
            found.append(sql)
    return found
