"""The values of ``--set``: what a person typed, as the columns hold it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import copy
from typing import Any

from django.core.exceptions import FieldDoesNotExist, ValidationError
from django.core.management.base import CommandError
from django.db.models import JSONField, Model

from dcl_processor.errors import printable

from .choosing import USAGE_ERROR

#: What a model, or a field of the user's own, raises for a name or a text that it cannot take.
_UNUSABLE = (FieldDoesNotExist, ValidationError, AttributeError, TypeError, ValueError)


def typed_values(model: type[Model], texts: Sequence[str]) -> dict[str, Any]:
    """Return the values by column; raise ``CommandError`` for one that its column cannot hold."""
    values: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise CommandError(
                f"expected --set COLUMN=VALUE, got {text!r} without '='.",
                returncode=USAGE_ERROR,
            )
        try:
            values[name] = _typed(model._meta.get_field(name), value)
        except _UNUSABLE as error:
            said = " ".join(error.messages) if isinstance(error, ValidationError) else str(error)
            raise CommandError(
                f"expected --set COLUMN=VALUE, got {text!r}: {printable(said).rstrip('.')}.",
                returncode=USAGE_ERROR,
            ) from error
    return values


def _typed(field: Any, text: str) -> Any:
    while field.is_relation:
        field = field.target_field
    # A copy that is checked in full: Django skips the choices of a column that forms do not show,
    # and whether a text may be empty is a rule for forms.
    column = copy(field)
    column.editable = column.blank = True
    value = json.loads(text, cls=column.decoder) if isinstance(column, JSONField) else text
    return column.clean(value, None)
