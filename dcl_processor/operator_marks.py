"""The values of a row's columns in plain types, which are compared, kept, and written as texts.

Objects of a field's own class may have no ``__eq__``, so that no row would be as it was, and the
text of an object without ``__repr__`` has its address, which differs from process to process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from types import NoneType, SimpleNamespace
from typing import Any
from uuid import UUID

from django.db import connections

#: The types whose texts tell their values apart, and are the same in each process.
_PLAIN = frozenset(
    {NoneType, bool, int, float, str, bytes, Decimal, date, datetime, time, timedelta, UUID}
)

#: In the text of an object that has none of its own.
_ADDRESS = " at 0x"


def plain(field: Any, value: Any, using: str) -> Any:
    """Return a column's value in plain types; ``None`` if it has no such form."""
    # The value itself first: the field may encrypt it, each time to another text.
    with suppress(TypeError):
        return _plain(value)
    for form in _forms(field, value, using):
        # A field of the user's own may refuse in any way.
        with suppress(Exception):
            found = _plain(form())
            if _ADDRESS not in repr(found):
                return found
    return None


def _forms(field: Any, value: Any, using: str) -> Iterator[Callable[[], Any]]:
    yield lambda: field.get_prep_value(value)
    yield lambda: field.get_db_prep_value(value, connections[using])
    yield lambda: field.value_to_string(SimpleNamespace(**{field.attname: value}))


def _plain(value: Any) -> Any:
    """Return the value in plain types; raises ``TypeError``."""
    if type(value) in _PLAIN:
        return value
    match value:
        case memoryview() | bytearray():
            return bytes(value)
        case list() | tuple():
            return [_plain(each) for each in value]
        case set() | frozenset():
            # Their order differs from process to process.
            return sorted((_plain(each) for each in value), key=repr)
        case dict():
            return sorted(([_plain(key), _plain(each)] for key, each in value.items()), key=repr)
    raise TypeError(f"expected a value in plain types, got {type(value).__name__}")
