"""Lock rows, check them and return them, by a statement that is compiled once.

PostgreSQL can write to them in the same statement: its ``UPDATE`` takes rows from a common table
expression that locks them, and returns what it wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Generic, TypeVar

from django.db import connections
from django.db.models import Expression, IntegerField, Model, QuerySet, sql

from dcl_processor.values import Values

from .placeholders import Assignments, CompiledStatement, KeyPlaceholder, compiled

R = TypeVar("R")


class PartlyRead(list[Any]):
    """Answers in which ``None`` stands for each value that the driver could not read."""

    error: Exception


class RowBuilder(Generic[R]):
    """Builds the rows of a queryset from given answers, repeatedly.

    The user's own queryset builds them, with all that its class, its fields and its model do in the
    process: ``Manager.raw()`` does not use the queryset's class, and takes no answers. The builder
    serves the connection of one thread. ``sql``, ``params``: the queryset's statement;
    ``selected``: the SQL of its columns.
    """

    def __init__(self, queryset: QuerySet[Any, R], using: str) -> None:
        rows: Any = queryset
        # Race: double claim. A cache of queries would answer in the place of the given answers.
        rows._for_write = True  # noqa: SLF001  # it has no public name
        self._queryset = rows
        self._query: Any = queryset.query
        self._compiler: Any = self._query.get_compiler(using)
        self.sql, self.params = self._compiler.as_sql()
        self.selected = [part for _, part, _ in self._compiler.select]
        columns = [each for each, *_ in self._compiler.select[: self._compiler.col_count]]
        converters = self._compiler.get_converters(columns)
        composite = self._compiler.has_composite_fields(columns)
        # These are the same for all answers.
        vars(self._compiler)["get_converters"] = lambda *_: converters
        vars(self._compiler)["has_composite_fields"] = lambda *_: composite

    def build(self, answers: Sequence[Sequence[Any]]) -> list[R]:
        """Return the rows; further columns of an answer are ignored."""
        if isinstance(answers, PartlyRead):
            raise answers.error
        queryset, compiler = self._queryset, self._compiler
        vars(compiler)["execute_sql"] = lambda *_, **__: [answers]
        # The queryset and its query are not shared. The compiler is set temporarily, because it
        # refers to the query, and a reference cycle would wait for the garbage collector.
        vars(self._query)["get_compiler"] = lambda *_, **__: compiler
        try:
            return list(queryset)
        finally:
            del vars(self._query)["get_compiler"]
            del vars(compiler)["execute_sql"]
            # As if it had never been evaluated.
            queryset._result_cache, queryset._prefetch_done = None, False  # noqa: SLF001  # no public name


class CompiledSelect(Generic[R]):
    """A queryset for keys that are given at execution, compiled for the connection of one thread.

    ``ask``: returns the queryset for the rows that the placeholder stands for; ``change``: changes
    the statement; ``column``: as for ``KeyPlaceholder``. ``build()`` returns the rows that given
    answers stand for.
    """

    def __init__(
        self,
        model: type[Model],
        using: str,
        ask: Callable[[KeyPlaceholder], QuerySet[Any, R]],
        change: Callable[[str], str] = str,
        *,
        many: bool,
        column: str | None = None,
    ) -> None:
        keys = KeyPlaceholder(model, using, many=many, column=column)
        self._rows = RowBuilder(ask(keys), using)
        self.build = self._rows.build
        self.sql = change(self._rows.sql)
        #: Returns the statement's parameters for given keys.
        self.params = CompiledStatement(self.sql, self._rows.params, keys).params


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
        keys = KeyPlaceholder(model, using, many=many)
        self._assignments = Assignments(model, using, values)
        asked = ask(keys)
        columns = self._assignments.columns
        self.claim = ClaimUpdate(using, asked, first(asked, keys), columns)
        written = self._assignments.placeholders.values()
        self._statement = CompiledStatement(self.claim.sql, self.claim.params, keys, written)

    def params(self, pks: Sequence[Any], values: Values) -> Sequence[Any] | None:
        """Return the parameters of ``claim`` for these rows.

        ``None``: it does not fit, because a field turns its value into SQL.
        """
        known = self._assignments
        filled = known.last_filled if values is known.last else known.filled(values)
        return None if filled is None else self._statement.params(pks, filled)


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
