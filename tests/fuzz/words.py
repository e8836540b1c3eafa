"""What the texts of the generated questions and flips may name."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

from django.db import models
from django.db.models import functions, lookups
from django.db.models.expressions import RawSQL
from django.utils.text import format_lazy
from hypothesis import strategies as st

from tests import models as tables

Text = st.SearchStrategy[str]

PAST = datetime(2020, 2, 29, 12, 30, 15, 123_456, tzinfo=UTC)
FUTURE = datetime(2190, 1, 1, tzinfo=UTC)


def lazily(text: str) -> Any:
    """Return a text that is made when it is used, as translations are."""
    return format_lazy("{}", text)


def mostly(usual: Text, *others: Text) -> Text:
    """Draw from the first three times out of four; ``one_of()`` would draw from all alike."""
    some = (usual,) * 3 * len(others) + others
    # Not the values, or each would count once.
    return st.sampled_from(range(len(some))).flatmap(lambda place: some[place])


NAMES: Mapping[str, Any] = {
    **{name: getattr(models, name) for name in models.__all__},
    **{name: getattr(functions, name) for name in functions.__all__},
    **{name: getattr(lookups, name) for name in ("Exact", "GreaterThan")},
    **{name: value for name, value in vars(tables).items() if isinstance(value, type)},
    "RawSQL": RawSQL,
    "lazily": lazily,
    "Decimal": Decimal,
    "date": date,
    "time": time,
    "timedelta": timedelta,
    "UUID": uuid.UUID,
    "PAST": PAST,
    "FUTURE": FUTURE,
}

#: The values that columns of each kind hold, are compared with and are flipped to.
VALUES: Mapping[str, tuple[str, ...]] = {
    "bool": ("False", "True"),
    "int": ("0", "1", "2", "-3"),
    "text": ("''", "'a'", "'b'", "'A%_'"),
    "time": ("PAST", "FUTURE"),
    "decimal": ("Decimal('0')", "Decimal('1.50')", "Decimal('-99.99')"),
    "date": ("date(2020, 2, 29)", "date(2190, 1, 1)"),
    "hour": ("time(0, 0)", "time(23, 59, 59)"),
    "span": ("timedelta(0)", "timedelta(days=-1, microseconds=1)", "timedelta(days=400)"),
    "colour": ("Colour.RED", "Colour.BLUE"),
    "word": ("'LOUD'", "'quiet'"),
    "uuid": ("UUID(int=1)", "UUID(int=2**127)"),
    "float": ("0.0", "0.5", "-1e9"),
    "json": ("{}", "{'a': 1}", "{'a': None}", "[1, 'x']", "'text'", "7", "False"),
    "bytes": ("b''", "b'\\x00\\xff'"),
    "address": ("'127.0.0.1'", "'::1'"),
}


def meaning(text: str) -> Any:
    """Return what a text of these names means."""
    return eval(text, dict(NAMES))  # noqa: S307  # made by the strategies of this folder
