"""The open keys of the rows that a statement is about: one key, or a list of keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from django.db import connections
from django.db.models import BooleanField, F, Func, IntegerField, Model, Q

from .places import NotOpenError, Open

#: The types of which the database accepts a list as one parameter without a type of its own.
_LISTED = ("integer", "bigint", "smallint", "uuid", "varchar")


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows that a statement is about.

    ``condition``: names them; ``order``: returns the expression that sorts them in the order in
    which they are named, which few statements need.
    """

    condition: Q
    order: Callable[[], Any]


class Keys:
    """An open primary key: of one row, or of ``many`` at once.

    Many keys are one parameter if the database accepts a list, so that a statement fits a batch of
    any size, and is not parsed again key by key. Raises ``NotOpenError`` if it does not.
    """

    def __init__(self, model: type[Model], using: str, *, many: bool) -> None:
        self._connection = connections[using]
        self.place = open_key(model)
        self._many = many
        self.rows = self._listed() if many else Rows(Q(pk=self.place), lambda: "pk")

    def _listed(self) -> Rows:
        kind = _listed_type(self.place.output_field, self._connection)
        any_of = Func(
            *(F("pk"), self.place),
            template="%(expressions)s)",
            arg_joiner=" = ANY(",
            output_field=BooleanField(),
        )
        position = Func(
            *(self.place, F("pk")),
            template="array_position(%(expressions)s)",
            arg_joiner=f"::{kind}[], ",
            output_field=IntegerField(),
        )
        return Rows(Q(any_of), lambda: position)

    def filled(self, pks: Sequence[Any]) -> dict[Open, Any]:
        """Return the keys in the database's form, by their place."""
        prepare, connection = self.place.output_field.get_db_prep_value, self._connection
        keys = [prepare(pk, connection) for pk in pks]
        return {self.place: keys if self._many else keys[0]}


def open_key(model: type[Model]) -> Open:
    """Return an open place for the primary key; raises ``NotOpenError`` for a composite one."""
    fields = model._meta.pk_fields
    if len(fields) != 1:
        raise NotOpenError
    return Open(fields[0])


def _listed_type(field: Any, connection: Any) -> str:
    """Return the type of a key that may be listed; raises ``NotOpenError`` for another one."""
    named = field.db_type(connection) or ""
    kinds = [kind for kind in _LISTED if named.startswith(kind)]
    if connection.vendor != "postgresql" or not kinds:
        raise NotOpenError
    return kinds[0]
