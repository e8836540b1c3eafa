"""Rows to choose from, and a session that holds some of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.db import transaction

from tests.models import Parcel

UNSENT = Parcel.objects.filter(sent=False)


def parcels(number: int, **columns: Any) -> list[Parcel]:
    """Make parcels, whose priorities are their places."""
    rows = [Parcel(priority=place, **columns) for place in range(number)]
    return Parcel.objects.bulk_create(rows)


@contextmanager
def held(rows: list[Parcel]) -> Iterator[None]:
    """Have another session hold these."""
    with transaction.atomic(using="other"):
        locked = Parcel.objects.using("other").filter(pk__in=[row.pk for row in rows])
        assert len(locked.select_for_update()) == len(rows)
        yield
