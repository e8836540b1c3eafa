"""Primary keys as operators write and read them; the columns of a composite one have commas."""

from __future__ import annotations

import re
from typing import Any

from django.core.exceptions import ValidationError
from django.db.models import Model

from dcl_processor.processor import BatchProcessor

from . import rows


def parse_pk(processor: BatchProcessor[Any], text: str, *, using: str | None = None) -> Any:
    """Return the primary key that the text names; columns of a composite key are joined by commas.

    A comma or a backslash in such a column follows a backslash, as ``key_text()`` writes it.
    Raises ``ValidationError`` or ``ValueError`` for a text that is no key.
    """
    return parsed(rows.question_of(processor, using).model, text)


def parsed(model: type[Model], text: str) -> Any:
    """Return the primary key of the model that the text names; raises as ``parse_pk()`` does."""
    fields = model._meta.pk_fields
    if len(fields) == 1:
        return _parsed(fields[0], text)
    texts = _split(text)
    if len(texts) != len(fields):
        raise ValueError(f"expected {len(fields)} values joined by commas, got {text!r}")
    return tuple(_parsed(each, part) for each, part in zip(fields, texts, strict=True))


def _parsed(field: Any, text: str) -> Any:
    while field.remote_field:
        field = field.target_field
    try:
        return field.to_python(text)  # spaces may be a part of a text
    except (ValidationError, ValueError):
        return field.to_python(text.strip())


def key_text(pk: Any) -> str:
    """Return a primary key as ``parse_pk()`` reads it."""
    if not isinstance(pk, tuple):
        return str(pk)
    return ",".join(re.sub(r"([\\,])", r"\\\1", str(each)) for each in pk)


def _split(text: str) -> list[str]:
    parts = [""]
    for escaped, comma, other in re.findall(r"\\([\\,])|(,)|(.)", text, re.DOTALL):
        if comma:
            parts.append("")
        parts[-1] += escaped or other
    return parts
