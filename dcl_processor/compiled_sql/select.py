"""Read rows by a statement that is compiled once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from django.db.models import Model, QuerySet

from .placeholders import CompiledStatement, KeyPlaceholder

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
        self._queryset: Any = queryset
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
        sql = change(self._rows.sql)
        self._statement = CompiledStatement(sql, self._rows.params, keys)

    def statement(self, pks: Sequence[Any]) -> tuple[str, Sequence[Any]]:
        """Return the statement for these rows, and its parameters."""
        return self._statement.sql, self._statement.params(pks)
