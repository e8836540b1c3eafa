"""The placeholders of a compiled statement: for keys, for values, and what fills them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from django.core.exceptions import ValidationError
from django.db import connections
from django.db.models import (
    AutoField,
    BigAutoField,
    BigIntegerField,
    BooleanField,
    DurationField,
    Expression,
    F,
    Field,
    Func,
    IntegerField,
    Model,
    Q,
    SmallAutoField,
)

from dcl_processor.clock import DatabaseNow, Later
from dcl_processor.values import Values

#: Django's fields that write whole numbers as they are.
_WHOLE_NUMBERS = (AutoField, BigAutoField, IntegerField, BigIntegerField, SmallAutoField)

_NONE: Mapping[Any, Any] = MappingProxyType({})

#: The types of which the database accepts a list as one parameter without a type of its own.
_LISTED = ("integer", "bigint", "smallint", "uuid", "varchar")


class CannotParametrize(Exception):
    """The statement has no place for a value that comes later, so it is built for each row.

    Fields and keys of other kinds than Django's usual ones cause it.
    """


class Placeholder(Expression):
    """A value of a field that is not known when the statement is compiled.

    It is its own parameter, so that it is found among the parameters of the compiled statement.
    """

    def __init__(self, field: Any) -> None:
        super().__init__(output_field=field)

    def resolve_expression(self, *_: Any, **__: Any) -> Placeholder:
        return self  # a copy would not be found among the parameters

    def relabeled_clone(self, change_map: Any) -> Placeholder:  # noqa: ARG002  # Django's signature
        return self  # as above: it names no table

    def as_sql(self, compiler: Any, connection: Any) -> tuple[str, Any]:  # noqa: ARG002  # Django's signature
        return "%s", [self]

    def assigned(self) -> Any:
        """Return what a column is set to, as an expression with this placeholder."""
        return self

    def saved(self, value: Any, connection: Any) -> Any:
        """Return a value to write, in the database's form."""
        return self.output_field.get_db_prep_save(value, connection)

    # Placeholders are compared by identity.
    __eq__ = object.__eq__
    __hash__ = object.__hash__


class DelayPlaceholder(Placeholder):
    """The delay of a ``Later``."""

    def __init__(self) -> None:
        super().__init__(DurationField())

    def assigned(self) -> Any:
        return DatabaseNow() + self

    def saved(self, value: Any, connection: Any) -> Any:
        return super().saved(value.delay, connection)


class KeyPlaceholder:
    """The primary key of one row, or with ``many`` the keys of any number of rows.

    Many keys are one parameter if the database accepts a list, so that a statement fits a batch of
    any size, and is not parsed again key by key. Raises ``CannotParametrize`` if it does not, and
    for a composite key. ``condition``: is true for the rows with these keys. ``column``: stands for
    values of this column instead.
    """

    def __init__(
        self, model: type[Model], using: str, *, many: bool, column: str | None = None
    ) -> None:
        fields: list[Any] = [*model._meta.pk_fields]
        if column is not None:
            fields = [model._meta.get_field(column)]
        if len(fields) != 1:
            raise CannotParametrize
        connection, kind = connections[using], fields[0].db_type(connections[using]) or ""
        if many and not (connection.vendor == "postgresql" and kind.startswith(_LISTED)):
            raise CannotParametrize
        self.many = many
        self._column = column or "pk"
        self.placeholder = Placeholder(fields[0])
        #: Brings a key into the database's form.
        self.prepare = partial(fields[0].get_db_prep_value, connection=connection)
        #: Whether a whole number is in that form already, as with Django's own fields.
        self.is_whole_number = type(fields[0]) in _WHOLE_NUMBERS
        one = Q(**{self._column: self.placeholder})
        self.condition = Q(self._is_listed()) if many else one

    def order(self) -> Any:
        """Return the expression that sorts the rows in the order in which the keys are given."""
        if not self.many:
            return "pk"
        return Func(
            *(self.placeholder, F("pk")),
            # Without a type: the column's may be another than the field's.
            template="array_position(%(expressions)s)",
            arg_joiner=", ",
            output_field=IntegerField(),
        )

    def _is_listed(self) -> Func:
        return Func(
            *(F(self._column), self.placeholder),
            template="%(expressions)s)",
            arg_joiner=" = ANY(",
            output_field=BooleanField(),
        )


def _list_of(keys: Sequence[Any]) -> Any:
    """Return the keys as one parameter; psycopg2 would make a list of ``text`` of any texts."""
    if not all(isinstance(key, str) for key in keys):
        return keys
    escaped = [key.replace("\\", r"\\").replace('"', r"\"") for key in keys]
    return "{" + ",".join([f'"{key}"' for key in escaped]) + "}"


class Assignments:
    """What a statement writes: expressions, and placeholders for values and delays.

    ``columns``: by name, what the statement sets them to. Raises ``CannotParametrize`` for related
    rows, and for fields that add SQL around their value.
    """

    def __init__(self, model: type[Model], using: str, values: Values) -> None:
        self._connection = connections[using]
        #: The values that were filled in last, mostly the same object for all rows, and the result.
        self.last: Values | None = None
        self.last_filled: dict[Placeholder, Any] | None = None
        self.placeholders: dict[str, Placeholder] = {}
        for name, value in values.items():
            field: Field[Any, Any] = model._meta.get_field(name)  # type: ignore[assignment]  # relations too
            if hasattr(value, "prepare_database_save") or _has_placeholder(field):
                raise CannotParametrize
            if type(value) is Later:
                self.placeholders[name] = DelayPlaceholder()
            elif not hasattr(value, "resolve_expression"):
                self.placeholders[name] = Placeholder(field)
        assigned = {name: each.assigned() for name, each in self.placeholders.items()}
        self.columns: Values = {**values, **assigned}

    def filled(self, values: Values) -> dict[Placeholder, Any] | None:
        """Return the values in the database's form, by their placeholder.

        ``None``: a field turns its value into SQL, so that the statement does not fit.
        """
        filled = {
            each: each.saved(values[name], self._connection)
            for name, each in self.placeholders.items()
        }
        is_sql = any(hasattr(value, "as_sql") for value in filled.values())
        self.last, self.last_filled = values, None if is_sql else filled
        return self.last_filled


def _has_placeholder(field: Any) -> bool:
    """Return whether a field adds SQL around its value; Django 6.1 uses the second name."""
    return hasattr(field, "get_placeholder") or hasattr(field, "get_placeholder_sql")


class CompiledStatement:
    """The SQL of a statement, and its parameters with their placeholders, ``keys`` among them.

    Raises ``CannotParametrize`` if one of the placeholders is not among the parameters, because a
    field, unlike Django's own, changed it.
    """

    def __init__(
        self,
        sql: str,
        params: Sequence[Any],
        keys: KeyPlaceholder,
        placeholders: Iterable[Placeholder] = (),
    ) -> None:
        self._keys, self._prepare = keys.placeholder, keys.prepare
        self._many, self._is_whole_number = keys.many, keys.is_whole_number
        self._places: dict[Placeholder, list[int]] = {}
        for place, each in enumerate(params):
            if isinstance(each, Placeholder):
                self._places.setdefault(each, []).append(place)
        if not {self._keys, *placeholders} <= self._places.keys():
            raise CannotParametrize
        self.sql = sql
        self.parameters = params

    def params(self, pks: Sequence[Any], values: Mapping[Placeholder, Any] = _NONE) -> list[Any]:
        """Return the parameters of one execution: for the rows with these keys."""
        keys: Any
        if self._is_whole_number and {*map(type, pks)} == {int}:
            # As the database writes a list: the driver would look at each number several times.
            keys = f"{{{','.join(map(str, pks))}}}" if self._many else pks[0]
        else:
            prepared = [self._prepare(pk) for pk in pks]
            keys = _list_of(prepared) if self._many else prepared[0]
        params = [*self.parameters]
        for place in self._places[self._keys]:
            params[place] = keys
        for placeholder, value in values.items():
            for place in self._places.get(placeholder, ()):
                params[place] = value
        return params


def compiled(compiler: Any) -> tuple[str, Sequence[Any]]:
    """Compile; raises ``CannotParametrize`` if a user's field fails on a placeholder."""
    try:
        sql, params = compiler.as_sql()
    except (ValidationError, AttributeError, TypeError, ValueError) as error:
        # A user's field failed on the placeholder; with a value its own error is raised.
        raise CannotParametrize from error
    return sql, params
