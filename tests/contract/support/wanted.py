"""Rows that cannot be loaded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from django.db.models import Model

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
