"""The rows that an operator chose, as they were then: many of them are kept in a file."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from tempfile import TemporaryFile
from types import NoneType, SimpleNamespace
from typing import IO, Any
from uuid import UUID

from django.db import connections

#: Rows by primary key, each with the values of the columns that workers write, and whether it is
#: in ``pending``.
Marks = Mapping[Any, Sequence[Any]]


class Chosen(Collection[Any]):
    """The keys of rows in the order of their choice, with their marks.

    Of ``size`` rows the marks are in memory, and those of all others in a temporary file, which
    has no name, and which ends with the object.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._number = 0
        self._last: dict[Any, Sequence[Any]] = {}
        #: Where each full chunk begins in the file, or the chunk if it cannot be stored.
        self._full: list[int | Marks] = []
        self._file: IO[bytes] | None = None

    def add(self, pk: Any, marks: Sequence[Any]) -> None:
        """Add a row that is not among them."""
        if len(self._last) >= self._size:
            self._full.append(self._store(self._last))
            self._last = {}
        self._last[pk] = marks
        self._number += 1

    def chunks(self, size: int | None = None) -> Iterator[Marks]:
        """Yield the rows in chunks of at most so many, which is not more than they are kept in."""
        for place in [*self._full, self._last]:
            chunk = self._load(place) if isinstance(place, int) else place
            keys = [*chunk]
            step = size or self._size
            for at in range(0, len(keys), step):
                yield {pk: chunk[pk] for pk in keys[at : at + step]}

    def __iter__(self) -> Iterator[Any]:
        return (pk for chunk in self.chunks() for pk in chunk)

    def __len__(self) -> int:
        return self._number

    def __contains__(self, pk: object) -> bool:
        return any(pk in chunk for chunk in self.chunks())

    def _store(self, chunk: Marks) -> int | Marks:
        with suppress(Exception):  # a class of the user's own may refuse in any way
            written = pickle.dumps(chunk)
            # Equal in memory and when it comes back, or no row would be found as it was.
            if pickle.loads(written) == chunk:  # noqa: S301  # written in the line before
                return self._append(written)
        return chunk

    def _append(self, written: bytes) -> int:
        if self._file is None:
            self._file = TemporaryFile()  # noqa: SIM115  # closed below
            weakref.finalize(self, self._file.close)
        self._file.seek(0, 2)
        place = self._file.tell()
        self._file.write(written)
        return place

    def _load(self, place: int) -> Marks:
        assert self._file is not None
        self._file.seek(place)
        chunk: Marks = pickle.load(self._file)  # noqa: S301  # a file that no other process has
        return chunk


# --- the values of a row's columns in plain types, which are compared, kept, and written as texts
#
# Objects of a field's own class may have no ``__eq__``, so that no row would be as it was, and the
# text of an object without ``__repr__`` has its address, which differs from process to process.


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
