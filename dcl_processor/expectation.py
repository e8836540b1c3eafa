"""What an option that names a column requires of it."""

from __future__ import annotations

from typing import Any

from django.db.models import Field, Model

from dcl_processor.exceptions import InvalidOption


def expect(
    model: type[Model],
    name: str,
    kind: type[Field[Any, Any]] | tuple[type[Field[Any, Any]], ...],
    *,
    null: bool | None = None,
    named: str,
    words: str,
) -> None:
    """Raise ``InvalidOption`` unless the model has such a column; ``null``: whether it may be NULL.

    ``named`` and ``words`` are the beginning and the middle of the sentence.
    """
    column = {field.name: field for field in model._meta.concrete_fields}.get(name)
    fits = isinstance(column, kind) and not column.primary_key and not column.generated
    if fits and null in (None, column.null):  # type: ignore[union-attr]  # it fits: it is one
        return
    raise InvalidOption(
        f"{named} to name {words} of {model._meta.label}, got {_kind_of(column)}; add the column, "
        "or name another."
    )


def _kind_of(column: Any) -> str:
    if column is None:
        return "no such column"
    kind = "the primary key" if column.primary_key else f"a {type(column).__name__}"
    return f"{kind} that {'may' if column.null else 'cannot'} be NULL"
