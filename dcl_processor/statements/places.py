"""The open places of a statement, and the values that fill them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from django.db.models import DurationField, Expression, Field, Model
from django.db.models.lookups import Exact

from dcl_processor.clock import DatabaseNow, Later
from dcl_processor.values import Values


class Open(Expression):
    """A place in a statement for a value of a field, filled in when it is executed."""

    def __init__(self, field: Any) -> None:
        super().__init__(output_field=field)

    def resolve_expression(self, *_: Any, **__: Any) -> Open:
        return self  # a copy would not be found among the parameters

    def relabeled_clone(self, change_map: Any) -> Open:  # noqa: ARG002  # Django's signature
        return self  # as above: it names no table

    def as_sql(self, compiler: Any, connection: Any) -> tuple[str, Any]:  # noqa: ARG002  # Django's signature
        return "%s", [self]

    def written(self) -> Any:
        """Return what the column is set to while the place is open."""
        return self

    def prepared(self, value: Any, connection: Any) -> Any:
        """Return a value in the database's form."""
        return self.output_field.get_db_prep_save(value, connection)

    # Places are compared by identity.
    __eq__ = object.__eq__
    __hash__ = object.__hash__


class OpenDelay(Open):
    """A place for the delay of a ``Later``."""

    def __init__(self) -> None:
        super().__init__(DurationField())

    def written(self) -> Any:
        return DatabaseNow() + self

    def prepared(self, value: Any, connection: Any) -> Any:
        return super().prepared(value.delay, connection)


class NotOpenError(Exception):
    """A field, unlike Django's own, changed the open place: fill it in before compiling."""


class Template:
    """A compiled statement, and its parameters with their open places."""

    def __init__(self, statement: str, params: Sequence[Any], places: Sequence[Open]) -> None:
        if not {*places} <= {each for each in params if isinstance(each, Open)}:
            raise NotOpenError
        self.sql = statement
        self._params = params

    def filled(self, values: Mapping[Open, Any]) -> tuple[Any, ...]:
        """Return the parameters for one execution."""
        return tuple(values[each] if isinstance(each, Open) else each for each in self._params)


def plain_field(model: type[Model], name: str) -> Any:
    """Return a field with a plain comparison; raises ``NotOpenError`` for another one."""
    field = model._meta.get_field(name)
    if field.is_relation or field.get_lookup("exact") is not Exact:
        raise NotOpenError
    return field


def open_values(model: type[Model], values: Values) -> dict[str, Open]:
    """Return open places for the values that are no expressions, and for delays."""
    opened: dict[str, Open] = {}
    for name, value in values.items():
        field: Field[Any, Any] = model._meta.get_field(name)  # type: ignore[assignment]  # relations too
        if hasattr(value, "prepare_database_save") or _has_placeholder(field):
            raise NotOpenError
        if type(value) is Later:
            opened[name] = OpenDelay()
        elif not hasattr(value, "resolve_expression"):
            opened[name] = Open(field)
    return opened


def _has_placeholder(field: Any) -> bool:
    """Return whether a field adds SQL around its value; Django 6.1 uses the second name."""
    return hasattr(field, "get_placeholder") or hasattr(field, "get_placeholder_sql")


def written(opened: Mapping[str, Open]) -> dict[str, Any]:
    """Return what the columns are set to in a statement with open places."""
    return {name: place.written() for name, place in opened.items()}


def prepared_key(place: Open, pk: Any, connection: Any) -> Any:
    """Return a key, or a value that a column is compared with, in the database's form."""
    return place.output_field.get_db_prep_value(pk, connection)
