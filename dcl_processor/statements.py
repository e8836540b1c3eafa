"""Statements that are compiled once, and executed for one row after another.

To build a query and compile it takes Django longer than it takes the database to answer. The
statements of a window differ in nothing but the row's key and the values that are written, so
these are left open, and filled in for each row. What is sent, and what is made of the answer, is
what Django would send and make of it, but for a pair of parentheses.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from django.core.exceptions import EmptyResultSet, FieldDoesNotExist, ValidationError
from django.db import connections, transaction
from django.db.models import (
    BooleanField,
    DurationField,
    Expression,
    F,
    Field,
    Func,
    Model,
    Q,
    QuerySet,
    sql,
)
from django.db.models.lookups import Exact

from .clock import DatabaseNow, Later

R = TypeVar("R")
S = TypeVar("S")

Values = Mapping[str, Any]

#: Statements that are kept at once; a window has a handful.
MOST_KEPT = 16


class Open(Expression):
    """A place in a statement for a value of a field, filled in when it is executed."""

    def __init__(self, field: Any) -> None:
        super().__init__(output_field=field)

    def resolve_expression(self, *_: Any, **__: Any) -> Open:
        return self  # a copy would not be found among the parameters

    def as_sql(self, compiler: Any, connection: Any) -> tuple[str, Any]:  # noqa: ARG002  # Django's signature
        return "%s", [self]

    def written(self) -> Any:
        """Return what the column is set to while the place is open."""
        return self

    def prepared(self, value: Any, connection: Any) -> Any:
        """Return a value as the database takes it."""
        return self.output_field.get_db_prep_save(value, connection)

    # Each place is itself, whatever it is made of.
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
    """A field did not leave the place open, as Django's own do: fill it in beforehand."""


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


class Selection(Generic[R]):
    """A queryset with an open key, compiled for the connection of one thread."""

    def __init__(
        self, model: type[Model], using: str, ask: Callable[[Q], QuerySet[Any, R]], *, many: bool
    ) -> None:
        self._keys = Keys(model, using, many=many)
        self._queryset: Any = ask(self._keys.condition)
        self._compiler: Any = self._queryset.query.get_compiler(using)
        statement, params = self._compiler.as_sql()
        self._template = Template(statement, params, [self._keys.place])
        selected = self._compiler.select[: self._compiler.col_count]
        converters = self._compiler.get_converters([expression for expression, *_ in selected])
        vars(self._compiler)["get_converters"] = lambda *_: converters

    def of(self, pks: Sequence[Any]) -> list[R]:
        """Execute it for these rows."""
        queryset, compiler = self._queryset, self._compiler
        filled = self._template.sql, self._template.filled(self._keys.filled(pks))
        vars(compiler)["as_sql"] = lambda *_, **__: filled
        # Nobody shares the queryset, nor its query. For the moment only: the compiler knows the
        # query, and a circle of the two would wait for the garbage collector.
        vars(queryset.query)["get_compiler"] = lambda *_, **__: compiler
        try:
            return list(queryset)
        finally:
            del vars(queryset.query)["get_compiler"]
            # As if it had never been evaluated.
            queryset._result_cache, queryset._prefetch_done = None, False  # noqa: SLF001  # no public name


class Update:
    """An update, with open key and open values.

    ``guard``: columns that must have the values named when it is executed.
    """

    def __init__(
        self,
        model: type[Model],
        using: str,
        values: Values,
        *,
        guard: Iterable[str] = (),
        many: bool = False,
    ) -> None:
        self._using = using
        self._keys = Keys(model, using, many=many)
        self._values = values  # whose expressions are told apart by where they are in memory
        self._open = open_values(model, values)
        self._guard = {name: Open(plain_field(model, name)) for name in guard}
        rows = QuerySet[Any](model, using=using).filter(self._keys.condition, **self._guard)
        query: Any = rows.query.chain(sql.UpdateQuery)
        query.add_update_values({**values, **written(self._open)})
        if query.related_updates:
            raise NotOpenError
        statement, params = compiled(query.get_compiler(using))
        places = [self._keys.place, *self._open.values(), *self._guard.values()]
        self._template = Template(statement, params, places)

    def write(
        self, pks: Sequence[Any], values: Values, guard: Values = MappingProxyType({})
    ) -> int | None:
        """Execute it for these rows; return how many were written.

        ``None``: nothing was sent, since a field makes SQL of its value.
        """
        connection = connections[self._using]
        filled = prepared_values(self._open, values, connection)
        if any(hasattr(value, "as_sql") for value in filled.values()):
            return None
        filled.update(self._keys.filled(pks))
        for name, place in self._guard.items():
            filled[place] = prepared_key(place, guard[name], connection)
        with transaction.mark_for_rollback_on_error(self._using), connection.cursor() as cursor:
            cursor.execute(self._template.sql, self._template.filled(filled))
            rows: int = cursor.rowcount
        return rows


def compiled(compiler: Any) -> tuple[str, Sequence[Any]]:
    """Compile; raises ``NotOpenError`` where a user's field chokes on a place that is open."""
    try:
        statement, params = compiler.as_sql()
    except (ValidationError, AttributeError, TypeError, ValueError) as error:
        # A user's field choked on what stands for its value; with a value it is to say so itself.
        raise NotOpenError from error
    return statement, params


class Statements(threading.local):
    """The statements of one window; each thread compiles its own, for its own connection."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, Any] = {}

    def get(self, name: Hashable, make: Callable[[], S]) -> S | None:
        """Return the statement of that name; ``None`` if it cannot be left open."""
        if name in self._kept:
            statement: S | None = self._kept.pop(name)
        else:
            statement = _made(make)
            if len(self._kept) >= MOST_KEPT:
                del self._kept[next(iter(self._kept))]
        # The last to be forgotten: a row with an expression of its own has a statement of its own,
        # and must not push out those that every row needs.
        self._kept[name] = statement
        return statement


def _made(make: Callable[[], S]) -> S | None:
    try:
        return make()
    except (NotOpenError, EmptyResultSet, FieldDoesNotExist):
        return None


def names(values: Values) -> Hashable:
    """Return by what the statement that writes such values is known."""
    return tuple((name, _kind(value)) for name, value in values.items())


def _kind(value: Any) -> Hashable:
    if type(value) is Later:
        return Later
    return id(value) if hasattr(value, "resolve_expression") else None


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


def prepared_key(place: Open, pk: Any, connection: Any) -> Any:
    """Return a key, or what a column is compared with, as the database takes it."""
    return place.output_field.get_db_prep_value(pk, connection)


def plain_field(model: type[Model], name: str) -> Any:
    """Return a field that is compared as it is; raises ``NotOpenError`` for another one."""
    field = model._meta.get_field(name)
    if field.is_relation or field.get_lookup("exact") is not Exact:
        raise NotOpenError
    return field


def open_values(model: type[Model], values: Values) -> dict[str, Open]:
    """Return open places for the values that are no expressions, and for delays."""
    opened: dict[str, Open] = {}
    for name, value in values.items():
        field: Field[Any, Any] = model._meta.get_field(name)  # type: ignore[assignment]  # relations too
        if hasattr(value, "prepare_database_save") or hasattr(field, "get_placeholder"):
            raise NotOpenError
        if type(value) is Later:
            opened[name] = OpenDelay()
        elif not hasattr(value, "resolve_expression"):
            opened[name] = Open(field)
    return opened


def written(opened: Mapping[str, Open]) -> dict[str, Any]:
    """Return what the columns are set to in a statement with open places."""
    return {name: place.written() for name, place in opened.items()}


def prepared_values(opened: Mapping[str, Open], values: Values, connection: Any) -> dict[Open, Any]:
    """Return values as the database takes them, by their places."""
    return {place: place.prepared(values[name], connection) for name, place in opened.items()}
