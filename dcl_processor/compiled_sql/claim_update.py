"""Lock rows, check them, write to them and return them, in one statement.

PostgreSQL's ``UPDATE`` takes rows from a common table expression that locks them, and returns
what it wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Generic, TypeVar

from django.db import connections
from django.db.models import Expression, IntegerField, Model, QuerySet, sql

from dcl_processor.values import Values

from .placeholders import Assignments, CompiledStatement, KeyPlaceholder, Placeholder, compiled
from .select import RowBuilder

R = TypeVar("R")

#: The name of the common table expression.
_TAKEN = "dcl_taken"


class ClaimUpdate(Generic[R]):
    """The statement for the rows of one queryset, which writes the same values to each.

    ``asked``: the question, narrowed to the rows; ``first``: the same, limited to the rows to lock.
    Each answer has the columns that ``asked`` selects, followed by the row's key, the old values of
    the written columns, and their new values.
    """

    def __init__(
        self, using: str, asked: QuerySet[Any, R], first: QuerySet[Any, Any], values: Values
    ) -> None:
        self._connection: Any = connections[using]
        self._names = [*values]
        self._rows = RowBuilder(asked, using)
        #: Returns the rows of given answers, as the user's queryset makes them.
        self.rows = self._rows.build
        parts = [
            _taken(first, values, using),
            _update(asked.model._meta.concrete_model, values, using),
            self._returning(asked, using),
        ]
        self.sql = " ".join(statement for statement, _ in parts)
        self.params = [each for _, params in parts for each in params]

    def marks(self, answers: Sequence[Any]) -> tuple[dict[Any, Values], dict[Any, Values]]:
        """Return the old and the new values of the written columns, by the rows' keys."""
        before: dict[Any, Values] = {}
        after: dict[Any, Values] = {}
        behind = [answer[len(self._rows.selected) :] for answer in answers]
        if self._converters:
            behind = self._compiler.apply_converters(behind, self._converters)
        for pk, *columns in behind:
            before[pk] = dict(zip(self._names, columns, strict=False))
            after[pk] = dict(zip(self._names, columns[len(self._names) :], strict=True))
        return before, after

    def _returning(self, asked: QuerySet[Any, R], using: str) -> tuple[str, list[Any]]:
        self._compiler: Any = asked.query.get_compiler(using)
        meta = asked.model._meta
        written = [meta.get_field(name) for name in self._names]
        columns = [each.get_col(meta.db_table) for each in (meta.pk_fields[0], *written, *written)]
        self._converters = self._compiler.get_converters(columns)
        stored = [self._compiler.compile(column) for column in columns]
        # The first column is the key; old values come from the expression that locked the rows.
        stored[1 : 1 + len(written)] = [(f"{_TAKEN}.{name}", ()) for name in _before(self._names)]
        behind = [
            column.select_format(self._compiler, statement, params)
            for column, (statement, params) in zip(columns, stored, strict=True)
        ]
        parts = [*self._rows.selected, *behind]
        returned = ", ".join(statement for statement, _ in parts)
        return f"RETURNING {returned}", [each for _, params in parts for each in params]


class CompiledClaim(Generic[R]):
    """A ``ClaimUpdate`` whose keys and values are given at execution.

    ``ask``: returns the question for the rows that the placeholder stands for; ``first``: limits it
    to the rows to lock.
    """

    def __init__(
        self,
        model: type[Model],
        using: str,
        ask: Callable[[KeyPlaceholder], QuerySet[Any, R]],
        first: Callable[[QuerySet[Any, R], KeyPlaceholder], QuerySet[Any, R]],
        values: Values,
        *,
        many: bool,
    ) -> None:
        self._connection = connections[using]
        keys = KeyPlaceholder(model, using, many=many)
        self._assignments = Assignments(model, values)
        asked = ask(keys)
        columns = self._assignments.columns
        self.claim = ClaimUpdate(using, asked, first(asked, keys), columns)
        written = self._assignments.placeholders.values()
        self._statement = CompiledStatement(self.claim.sql, self.claim.params, keys, written)
        #: The values that were written last, and their form for the database.
        self._last: Values | None = None
        self._assigned: dict[Placeholder, Any] | None = None

    def params(self, pks: Sequence[Any], values: Values) -> Sequence[Any] | None:
        """Return the parameters of ``claim`` for these rows.

        ``None``: it does not fit, because a field turns its value into SQL.
        """
        # Mostly the same object for all rows.
        if values is not self._last:
            self._assigned = self._assignments.filled(values, self._connection)
            self._last = values
        return None if self._assigned is None else self._statement.params(pks, self._assigned)


class _Stored(Expression):
    """A column of the model's own table as it is stored, even if its field changes its SELECT."""

    def __init__(self, column: str) -> None:
        super().__init__(output_field=IntegerField())
        self._column = column

    def as_sql(self, compiler: Any, connection: Any) -> tuple[str, Any]:
        quote = connection.ops.quote_name
        return f"{quote(compiler.query.base_table)}.{quote(self._column)}", []


def _before(names: Collection[str]) -> Iterator[str]:
    return (f"dcl_before_{place}" for place, _ in enumerate(names))


def _taken(first: QuerySet[Any, Any], values: Values, using: str) -> tuple[str, Sequence[Any]]:
    """Return the common table expression that locks the rows, and keeps their old values."""
    meta = first.model._meta
    columns = [str(meta.get_field(name).column) for name in values]
    stored = dict(zip(_before(values), map(_Stored, columns), strict=True))
    connection = connections[using]
    # Race: double claim. Another worker may have finished a row since its key was read.
    found = first.annotate(**stored).values_list("pk", *stored)
    select, params = found.query.get_compiler(using).as_sql()
    lock = connection.ops.for_update_sql(skip_locked=True, no_key=True)
    # If it is not materialised, the planner may lock one set of rows and update another.
    return (f"WITH {_TAKEN} (taken, {', '.join(stored)}) AS MATERIALIZED ({select} {lock})", params)


def _update(model: Any, values: Values, using: str) -> tuple[str, Sequence[Any]]:
    query: Any = QuerySet[Any](model, using=using).query.chain(sql.UpdateQuery)
    query.add_update_values(values)
    statement, params = compiled(query.get_compiler(using))
    quote = connections[using].ops.quote_name
    table, key = quote(model._meta.db_table), quote(str(model._meta.pk_fields[0].column))
    return f"{statement} FROM {_TAKEN} WHERE {table}.{key} = {_TAKEN}.taken", params
