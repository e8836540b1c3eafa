"""Parcels that a session holds, and those that cannot be loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from django.db import transaction
from django.db.models import Model

from tests.models import Parcel


@contextmanager
def held(rows: list[Parcel]) -> Iterator[None]:
    """Have another session hold these."""
    with transaction.atomic(using="other"):
        locked = Parcel.objects.using("other").filter(pk__in=[row.pk for row in rows])
        assert len(locked.select_for_update()) == len(rows)
        yield


#: Raises a ValueError.
corrupt = partial(int, "corrupt")


def refuse_to_load(
    row: Model, patch: pytest.MonkeyPatch, fault: Callable[[], Any] = corrupt
) -> None:
    """Let no instance be made of this row, as where a column's value makes no sense."""
    load = type(row).from_db.__func__  # type: ignore[attr-defined]

    def from_db(model: Any, *args: Any, **options: Any) -> Any:
        loaded = load(model, *args, **options)
        if loaded.pk == row.pk:
            fault()
        return loaded

    patch.setattr(type(row), "from_db", classmethod(from_db))
