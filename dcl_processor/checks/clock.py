"""Recognises a time that was read from the clock once, at the import of a module."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from typing import Any

from django.utils import timezone

# Modules are imported after this one, or a moment before it.
_STARTED = datetime.now(UTC)
_MARGIN = timedelta(seconds=10)


def is_frozen(value: Any) -> bool:
    """Return whether the constant looks as if it was read from a clock at this process's start.

    People do not write microseconds by hand, except the last one of a day. So microseconds show
    ``now() - timedelta(days=30)`` too.
    """
    if isinstance(value, datetime):
        aware = value if timezone.is_aware(value) else timezone.make_aware(value)
        recent = _STARTED - _MARGIN <= aware <= datetime.now(UTC) + _MARGIN
        return recent or value.microsecond not in (0, 999_999)
    if isinstance(value, date):
        return value in (datetime.now(UTC).date(), datetime.now().astimezone().date())
    return False
