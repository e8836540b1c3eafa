"""Parcels that a session holds, and those that cannot be loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import transaction

from tests.models import Parcel


@contextmanager
def held(rows: list[Parcel]) -> Iterator[None]:
    """Have another session hold these."""
    with transaction.atomic(using="other"):
        locked = Parcel.objects.using("other").filter(pk__in=[row.pk for row in rows])
        assert len(locked.select_for_update()) == len(rows)
        yield


def refuse_to_load(row: Parcel, patch: pytest.MonkeyPatch) -> None:
    """Let no instance be made of this row, as where a column's value makes no sense."""
    load = Parcel.from_db.__func__  # type: ignore[attr-defined]

    def from_db(cls: Any, *args: Any, **kwargs: Any) -> Any:
        loaded = load(cls, *args, **kwargs)
        if loaded.pk == row.pk:
            raise ValueError("corrupt")
        return loaded

    patch.setattr(Parcel, "from_db", classmethod(from_db))
