"""The rows that an operator chose, each with a short text by which a change of it is noticed."""

from __future__ import annotations

from base64 import urlsafe_b64encode
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from types import SimpleNamespace
from typing import Any

#: Rows by primary key, each with the digest of what it was when it was chosen.
Chosen = Mapping[Any, str]

#: Bytes of a digest, which are 8 characters, and what follows if the row was pending.
_DIGEST, _WAS_PENDING = 6, "+"


def digest(marks: Sequence[Any], *, is_pending: bool) -> str:
    """Return a text for the texts of columns, the same in each process while they are the same."""
    known = repr(marks).encode("utf-8", "surrogatepass")
    short = urlsafe_b64encode(blake2b(known, digest_size=_DIGEST).digest()).decode()
    return short + (_WAS_PENDING if is_pending else "")


def is_same(before: str, now: str) -> bool:
    """Return whether a row with these two digests is as it was.

    A row that was pending has to be pending still: of a flip that is a function, no column is
    known. A row that was not may be so since, because its time has come.
    """
    return now in (before, before + _WAS_PENDING)


#: In the text of an object that has none of its own, and whose address differs in each process.
_ADDRESS = " at 0x"


def plain(field: Any, value: Any) -> str | None:
    """Return a column's value as a text that is the same in each process; ``None`` without one."""
    if value is None or isinstance(value, str):
        return value
    row = SimpleNamespace(**{field.attname: value})
    # As it is serialised first: what is for the database may be encrypted, each time otherwise.
    for form, given in ((field.value_to_string, row), (field.get_prep_value, value)):
        # A field of the user's own may refuse in any way.
        with suppress(Exception):
            if _ADDRESS not in (text := repr(form(given))):
                return text
    return None
