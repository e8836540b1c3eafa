"""Read rows by a statement that is compiled once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from django.db.models import Model, QuerySet

from .keys import Keys, Rows
from .places import Template

R = TypeVar("R")


class Selection(Generic[R]):
    """A queryset with an open key, compiled for the connection of one thread."""

    def __init__(
        self, model: type[Model], using: str, ask: Callable[[Rows], QuerySet[Any, R]], *, many: bool
    ) -> None:
        self._keys = Keys(model, using, many=many)
        self._queryset: Any = ask(self._keys.rows)
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
