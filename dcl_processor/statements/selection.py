"""Read rows by a statement that is compiled once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from django.db import connections
from django.db.models import Model, QuerySet

from .keys import Keys, Rows
from .places import Template

R = TypeVar("R")


class Evaluation(Generic[R]):
    """A queryset that is evaluated repeatedly, each time from given answers.

    So the user's own queryset builds the rows from the answers, with all that its class, its
    fields and its model do in the process. It serves the connection of one thread.
    """

    def __init__(self, queryset: QuerySet[Any, R], using: str) -> None:
        self._queryset: Any = queryset
        self._query: Any = queryset.query
        self.compiler: Any = self._query.get_compiler(using)
        self.statement, self.params = self.compiler.as_sql()
        selected = [each for each, *_ in self.compiler.select[: self.compiler.col_count]]
        converters = self.compiler.get_converters(selected)
        composite = self.compiler.has_composite_fields(selected)
        # These are the same for all answers.
        vars(self.compiler)["get_converters"] = lambda *_: converters
        vars(self.compiler)["has_composite_fields"] = lambda *_: composite

    def of(self, answers: Sequence[Sequence[Any]]) -> list[R]:
        """Return the rows; further columns of an answer are ignored."""
        queryset, compiler = self._queryset, self.compiler
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


class Selection(Generic[R]):
    """A queryset with an open key, compiled for the connection of one thread."""

    def __init__(
        self, model: type[Model], using: str, ask: Callable[[Rows], QuerySet[Any, R]], *, many: bool
    ) -> None:
        self._connection = connections[using]
        self._keys = Keys(model, using, many=many)
        self._evaluation = Evaluation(ask(self._keys.rows), using)
        statement, params = self._evaluation.statement, self._evaluation.params
        self._template = Template(statement, params, [self._keys.place])

    def of(self, pks: Sequence[Any]) -> list[R]:
        """Execute the statement for these rows."""
        with self._connection.cursor() as cursor:
            cursor.execute(self._template.sql, self._template.filled(self._keys.filled(pks)))
            answers = cursor.fetchall()
        return self._evaluation.of(answers)
