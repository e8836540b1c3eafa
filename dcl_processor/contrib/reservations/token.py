"""The token of a reservation: what identifies the hold of a row, signed.

It contains no data of the row, and is readable: its signature proves that this site gave it out.
The salt contains the processor's name, and ``bound_to``, so that the tokens of another processor,
and those that were given to another agent, are not valid. There is no time limit besides the lease.
"""

from __future__ import annotations

import zlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from django.core import signing
from django.core.exceptions import ValidationError
from django.db import connections
from django.db.models import Model

from dcl_processor.exceptions import InvalidToken

from .hold import HandOut

if TYPE_CHECKING:
    from dcl_processor.definition.definition import Definition

#: The version of the contents.
VERSION = 1

_Contents = tuple[str, Any, int, int | None, int | None]


def sign(
    processor: Definition[Any], model: type[Model], hold: HandOut, bound_to: str | None
) -> str:
    """Return the token of a hold."""
    contents = [
        VERSION,
        hold.using,
        _key_as_text(model, hold.pk),
        hold.since,
        hold.duration,
        hold.attempts,
    ]
    return signing.dumps(contents, salt=_salt(processor, bound_to))


def unsign(processor: Definition[Any], token: Any, bound_to: str | None) -> tuple[str, _Contents]:
    """Return the alias and the other contents of a token, which ``hold()`` takes.

    Raises ``InvalidToken``.
    """
    try:
        contents = signing.loads(token, salt=_salt(processor, bound_to))
        version, using, pk, since, duration, attempts = contents
    except signing.BadSignature as error:
        raise _invalid(processor, "one that was changed, or given out elsewhere") from error
    # What is signed under the same salt may still be no token.
    except (ValueError, TypeError, AttributeError, LookupError, zlib.error) as error:
        raise _invalid(processor, "something else") from error
    numbers = [since, *(each for each in (duration, attempts) if each is not None)]
    if (
        version != VERSION
        or not isinstance(using, str)
        or not all(type(each) is int for each in numbers)
        or (duration is None) != (processor.lease is None)
        or (duration is not None and duration <= 0)
    ):
        raise _invalid(processor, "one of another version of the processor")
    if using not in connections.databases:
        raise _invalid(processor, f"one of a database {using!r} that is not in DATABASES")
    return using, (using, pk, since, duration, attempts)


def hold(processor: Definition[Any], model: type[Model], contents: _Contents) -> HandOut:
    """Return the hold that a token's contents identify; raises ``InvalidToken``."""
    using, pk, since, duration, attempts = contents
    try:
        return HandOut(using, _key_from_text(model, pk), since, duration, attempts)
    except (ValidationError, ValueError, TypeError) as error:
        raise _invalid(processor, f"one whose key {pk!r:.100} is no key of the model") from error


def _salt(processor: Definition[Any], bound_to: str | None) -> str:
    bound = "" if bound_to is None else f"\0{bound_to}"
    return f"dcl_processor.reservation:{processor.name}{bound}"


def _key_as_text(model: type[Model], pk: Any) -> str | list[str]:
    fields = model._meta.pk_fields
    if len(fields) == 1:
        return _as_text(fields[0], pk)
    return [_as_text(field, value) for field, value in zip(fields, pk, strict=True)]


def _as_text(field: Any, value: Any) -> str:
    while field.remote_field:
        field = field.target_field
    text: str = field.value_to_string(SimpleNamespace(**{field.attname: value}))
    return text


def _key_from_text(model: type[Model], text: Any) -> Any:
    fields: list[Any] = list(model._meta.pk_fields)
    texts = [text] if len(fields) == 1 else list(text)
    if not all(isinstance(each, str) for each in texts):
        raise TypeError
    keys = [field.to_python(each) for field, each in zip(fields, texts, strict=True)]
    return keys[0] if len(fields) == 1 else tuple(keys)


def _invalid(processor: Definition[Any], got: str) -> InvalidToken:
    return InvalidToken(
        f"{processor.name}: expected a token that reserve() gave out for this processor and this "
        f"bound_to, got {got}; reserve another row."
    )
