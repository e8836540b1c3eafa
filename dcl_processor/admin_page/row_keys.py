"""Primary keys as texts: in a form, in an address, and in a signed plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote

from django.db.models import Model

from dcl_processor.insights.keys import parse_pk
from dcl_processor.processor import BatchProcessor


def plain(pk: Any) -> Any:
    """Return a primary key as JSON has it."""
    if isinstance(pk, tuple):
        return [plain(each) for each in pk]
    return pk if isinstance(pk, (int, str)) else str(pk)


def of_plain(model: type[Model], value: Any) -> Any:
    """Return the primary key that JSON has so."""
    fields = model._meta.pk_fields
    if len(fields) == 1:
        return _python(fields[0], value)
    return tuple(_python(each, part) for each, part in zip(fields, value, strict=True))


def keys_of(processor: BatchProcessor[Any], texts: Sequence[str]) -> list[Any]:
    """Return the primary keys that a form names; raises the errors of ``parse_pk()``.

    ``texts``: escaped as in an address, because a browser changes line breaks in a form's values.
    """
    return list(dict.fromkeys(parse_pk(processor, unquote(text)) for text in texts))


def _python(field: Any, value: Any) -> Any:
    while field.remote_field:
        field = field.target_field
    return field.to_python(value)
