"""Whose rows a statement is about, left open: one key, or a list of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.db import connections
from django.db.models import BooleanField, F, Func, Model, Q

from .places import NotOpenError, Open, prepared_key


class Keys:
    """An open primary key: of one row, or of ``many`` at once.

    Many are one value where the database takes a list for one, so that a statement fits a batch of
    any size, and is not parsed again key by key. Raises ``NotOpenError`` where that cannot be.
    """

    def __init__(self, model: type[Model], using: str, *, many: bool) -> None:
        self._connection = connections[using]
        self.place = open_key(model)
        self.condition = Q(pk=self.place)
        self._many = many
        if many:
            if not _is_listed(self.place.output_field, self._connection):
                raise NotOpenError
            self.condition = Q(
                Func(
                    *(F("pk"), self.place),
                    template="%(expressions)s)",
                    arg_joiner=" = ANY(",
                    output_field=BooleanField(),
                )
            )

    def filled(self, pks: Sequence[Any]) -> dict[Open, Any]:
        """Return the keys as the database takes them, by their place."""
        keys = [prepared_key(self.place, pk, self._connection) for pk in pks]
        return {self.place: keys if self._many else keys[0]}


def open_key(model: type[Model]) -> Open:
    """Return an open place for the primary key; raises ``NotOpenError`` for a composite one."""
    fields = model._meta.pk_fields
    if len(fields) != 1:
        raise NotOpenError
    return Open(fields[0])


def _is_listed(field: Any, connection: Any) -> bool:
    """Tell whether a list of the field's values is one value, whose type needs no telling."""
    listed = ("integer", "bigint", "smallint", "uuid", "varchar")
    return connection.vendor == "postgresql" and (field.db_type(connection) or "").startswith(
        listed
    )
