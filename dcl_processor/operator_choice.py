"""The rows that an operator chose, each with a short text by which a change of it is noticed."""

from __future__ import annotations

from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from hashlib import blake2b
from types import NoneType, SimpleNamespace
from typing import Any
from uuid import UUID

from django.db import connections

#: Rows by primary key, each with the digest of what it was when it was chosen.
Chosen = Mapping[Any, str]

#: Bytes of a digest, which are 8 characters, and what follows if the row was pending.
_DIGEST, _WAS_PENDING = 6, "+"


def digest(marks: Sequence[Any], *, is_pending: bool) -> str:
    """Return a text for values in plain types, the same in each process while they are the same."""
    known = repr(marks).encode("utf-8", "surrogatepass")
    short = urlsafe_b64encode(blake2b(known, digest_size=_DIGEST).digest()).decode()
    return short + (_WAS_PENDING if is_pending else "")


def is_same(before: str, now: str) -> bool:
    """Return whether a row with these two digests is as it was.

    A row that was pending has to be pending still: of a flip that is a function, no column is
    known. A row that was not may be so since, because its time has come.
    """
    return now in (before, before + _WAS_PENDING)


# --- the values of a row's columns in plain types, whose texts are compared
#
# The text of an object without ``__repr__`` has its address, which differs from process to process.


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
