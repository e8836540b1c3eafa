"""Statements that Django compiles once per window, and that are bound to the rows at execution.

Django takes longer to build and compile a query than PostgreSQL takes to answer it. The statements
of a window differ only in the rows' keys and the values that are written, so these are placeholders
among the parameters. The answers are processed by the user's own queryset.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from django.core.exceptions import EmptyResultSet, FullResultSet, ValidationError
from django.db import connections
from django.db.models import (
    BooleanField,
    DurationField,
    Expression,
    F,
    Func,
    IntegerField,
    Model,
    Q,
    QuerySet,
    sql,
)

from dcl_processor.pending.clock import DatabaseNow, Later
from dcl_processor.pending.question import Question
from dcl_processor.report.values import Values

#: The types of a key of which PostgreSQL accepts a list as one parameter.
LISTED = ("integer", "bigint", "smallint", "uuid", "varchar")


class Statement(NamedTuple):
    """SQL, and its parameters."""

    sql: str
    params: Sequence[Any] = ()


#: In the place of a question that no row can meet, for which Django has no statement.
NOTHING = Statement("SELECT 1 FROM (SELECT 1 AS one) AS dcl_nothing WHERE 1 = 0")


class CannotCompile(Exception):
    """The statement has no place for a value that comes later, so it is built for each row."""


class Placeholder(Expression):
    """A value that is not known when the statement is compiled; it is its own parameter."""

    def __init__(self, field: Any) -> None:
        super().__init__(output_field=field)

    def resolve_expression(self, *_: Any, **__: Any) -> Placeholder:
        return self  # a copy would not be found among the parameters

    def relabeled_clone(self, change_map: Any) -> Placeholder:  # noqa: ARG002
        return self  # as above: it names no table

    def as_sql(self, compiler: Any, connection: Any) -> tuple[str, Any]:  # noqa: ARG002
        return "%s", [self]

    # Placeholders are compared by identity.
    __eq__ = object.__eq__
    __hash__ = object.__hash__


class Keys:
    """The primary keys of some rows, as one placeholder: one key, or a list of any length.

    ``condition``: is true for these rows; ``order``: sorts them in the order of the list.
    """

    def __init__(self, model: type[Model], *, many: bool) -> None:
        self.placeholder = Placeholder(model._meta.pk_fields[0])
        self.condition = Q(pk=self.placeholder)
        self.order: Any = "pk"
        if many:
            listed = (F("pk"), self.placeholder)
            is_any = {"template": "%(expressions)s)", "arg_joiner": " = ANY("}
            self.condition = Q(Func(*listed, output_field=BooleanField(), **is_any))
            place = {"template": "array_position(%(expressions)s)", "arg_joiner": ", "}
            self.order = Func(*reversed(listed), output_field=IntegerField(), **place)


def bound_keys(model: type[Model], using: str, pks: Sequence[Any], *, many: bool) -> Any:
    """Return the keys as the parameter that stands for them."""
    if {*map(type, pks)} != {int}:
        field: Any = model._meta.pk_fields[0]
        pks = [field.get_db_prep_value(pk, connections[using]) for pk in pks]
    if not many:
        return pks[0]
    if all(isinstance(pk, int) for pk in pks):
        # As the database writes a list: the driver would look at each number several times.
        return f"{{{','.join(map(str, pks))}}}"
    if all(isinstance(pk, str) for pk in pks):
        escaped = [pk.replace("\\", r"\\").replace('"', r"\"") for pk in pks]
        return "{" + ",".join([f'"{each}"' for each in escaped]) + "}"
    return list(pks)


class Template:
    """The SQL of a statement, and the places of its placeholders among the parameters."""

    def __init__(self, text: str, params: Sequence[Any], needed: Sequence[Placeholder]) -> None:
        self.sql, self._params = text, list(params)
        self._places = [
            (at, each) for at, each in enumerate(params) if isinstance(each, Placeholder)
        ]
        if not {*needed} <= {each for _, each in self._places}:
            raise CannotCompile  # a field, unlike Django's own, changed a placeholder

    def bind(self, values: Mapping[Placeholder, Any]) -> Statement:
        params = self._params.copy()
        for at, each in self._places:
            params[at] = values[each]
        return Statement(self.sql, params)


class Rows:
    """Builds the rows of a queryset from answers, repeatedly; the user's own queryset does it.

    ``sql``, ``params``: the queryset's statement; ``selected``: the SQL of its columns. Further
    columns of an answer are ignored.
    """

    def __init__(self, queryset: QuerySet[Any, Any], using: str) -> None:
        self._queryset, self._query = queryset, queryset.query
        self._compiler: Any = self._query.get_compiler(using)
        self.sql, self.params = self._compiler.as_sql()
        self.selected = [part for _, part, _ in self._compiler.select]
        self.selected_sql = [part for part, _ in self.selected]
        self.selected_params = [each for _, params in self.selected for each in params]
        columns = [each for each, *_ in self._compiler.select[: self._compiler.col_count]]
        converters = self._compiler.get_converters(columns)
        composite = self._compiler.has_composite_fields(columns)
        # These are the same for all answers.
        vars(self._compiler)["get_converters"] = lambda *_: converters
        vars(self._compiler)["has_composite_fields"] = lambda *_: composite

    def build(self, answers: Sequence[Sequence[Any]]) -> list[Any]:
        queryset, compiler = self._queryset, self._compiler
        vars(compiler)["execute_sql"] = lambda *_, **__: [answers]
        vars(self._query)["get_compiler"] = lambda *_, **__: compiler
        try:
            return list(queryset)
        finally:
            del vars(self._query)["get_compiler"], vars(compiler)["execute_sql"]
            # As if it had never been evaluated.
            vars(queryset).update(_result_cache=None, _prefetch_done=False)


#: Returns the queryset for the rows that a condition names, in an order.
Narrow = Callable[[Q, Any], QuerySet[Any, Any]]
Build = Callable[[Sequence[Any]], list[Any]]


def select(
    question: Question[Any],
    name: Any,
    pks: Sequence[Any],
    narrow: Narrow,
    *,
    change: Callable[[Question[Any], str], str] = lambda _, sql: sql,
) -> tuple[Statement, Build]:
    """Return the statement that reads rows by their keys, and what builds them of its answer.

    ``name``: of the statement in the cache. ``change``: changes its SQL.
    """
    cache, model, using = question.cache, question.model, question.using
    many = len(pks) > 1
    name = (name, many)
    if name not in cache:
        try:
            keys = Keys(model, many=many)
            rows = Rows(narrow(keys.condition, keys.order), using)
            template = Template(change(question, rows.sql), rows.params, [keys.placeholder])
            cache[name] = keys.placeholder, rows, template
        except EmptyResultSet:
            return NOTHING, lambda _: []
        except (CannotCompile, ValidationError, AttributeError, TypeError, ValueError):
            cache[name] = None  # a field of the user's own fails on a placeholder
    if cache[name] is None:
        rows = Rows(narrow(Q(pk__in=[*pks]), "pk"), using)
        return Statement(change(question, rows.sql), rows.params), rows.build
    placeholder, rows, template = cache[name]
    return template.bind({placeholder: bound_keys(model, using, pks, many=many)}), rows.build


# --- statements that write


class Assigned:
    """What a statement writes: expressions, and placeholders for constants and delays."""

    def __init__(self, model: type[Model], values: Values) -> None:
        self.places: dict[str, Placeholder] = {}
        self.columns: dict[str, Any] = {**values}
        for name, value in values.items():
            field: Any = model._meta.get_field(name)
            if hasattr(value, "prepare_database_save") or _adds_sql(field):
                raise CannotCompile
            if type(value) is Later:
                self.places[name] = Placeholder(DurationField())
                self.columns[name] = DatabaseNow() + self.places[name]
            elif not hasattr(value, "resolve_expression"):
                self.columns[name] = self.places[name] = Placeholder(field)

    def bound(self, values: Values, connection: Any) -> dict[Placeholder, Any]:
        """Return the values in the database's form; raises ``CannotCompile`` for SQL."""
        found: dict[Placeholder, Any] = {}
        for name, each in self.places.items():
            value = values[name].delay if type(values[name]) is Later else values[name]
            value = value() if callable(value) else value
            found[each] = each.output_field.get_db_prep_save(value, connection)
            if hasattr(found[each], "as_sql"):
                raise CannotCompile
        return found


def _adds_sql(field: Any) -> bool:
    return hasattr(field, "get_placeholder") or hasattr(field, "get_placeholder_sql")


def shape(values: Values) -> Any:
    """Return what the statements that write such values have in common; ``None``: unknown.

    An expression is known by its identity, which is that of an option of the processor.
    """
    kinds = list[tuple[str, Any]]()
    for name, value in values.items():
        if type(value) is Later:
            kinds.append((name, Later))
        elif hasattr(value, "prepare_database_save"):
            return None
        else:
            kinds.append((name, value if hasattr(value, "resolve_expression") else None))
    return tuple([(name, kind if kind in (None, Later) else id(kind)) for name, kind in kinds])


def update_sql(rows: QuerySet[Any, Any], values: Values) -> tuple[str, Sequence[Any]]:
    """Return the UPDATE of a queryset's rows; raises ``CannotCompile`` if that takes several."""
    query: Any = rows.query.chain(sql.UpdateQuery)
    query.add_update_values(values)
    if query.related_updates:
        raise CannotCompile
    statement: tuple[str, Sequence[Any]] = query.get_compiler(rows.db).as_sql()
    return statement


def condition_sql(rows: QuerySet[Any, Any]) -> tuple[str, Sequence[Any]]:
    """Return the condition of a queryset that joins no table; raises ``EmptyResultSet``."""
    query = rows.query.clone()
    compiler: Any = query.get_compiler(rows.db)
    compiler.pre_sql_setup()
    try:
        condition: tuple[str, Sequence[Any]] = compiler.compile(query.where)
    except FullResultSet:
        return "TRUE", ()
    return condition
