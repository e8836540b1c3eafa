"""Write rows by a statement that is compiled once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import MappingProxyType
from typing import Any

from django.db import connections, transaction
from django.db.models import Model, QuerySet, TextField, sql
from django.db.models.lookups import Exact

from dcl_processor.database.transaction_id import is_in_transaction
from dcl_processor.values import Values

from .placeholders import (
    Assignments,
    CannotParametrize,
    CompiledStatement,
    KeyPlaceholder,
    Placeholder,
    compiled,
)


class CompiledUpdate:
    """An update whose keys and values are given at execution.

    ``expected``: columns that must have the values given at execution. ``fenced``: it writes only
    in the transaction whose id is given at execution.
    """

    def __init__(
        self,
        model: type[Model],
        using: str,
        values: Values,
        *,
        expected: Iterable[str] = (),
        many: bool = False,
        fenced: bool = False,
    ) -> None:
        self._using = using
        self._connection = connections[using]
        self._keys = KeyPlaceholder(model, using, many=many)
        self._assignments = Assignments(model, values)
        self._expected = {name: Placeholder(_plain_field(model, name)) for name in expected}
        self._transaction = Placeholder(TextField()) if fenced else None
        rows = QuerySet[Any](model, using=using).filter(self._keys.condition, **self._expected)
        if self._transaction is not None:
            rows = rows.filter(is_in_transaction(self._transaction))
        query: Any = rows.query.chain(sql.UpdateQuery)
        query.add_update_values(self._assignments.columns)
        if query.related_updates:
            raise CannotParametrize
        statement, params = compiled(query.get_compiler(using))
        written = self._assignments.placeholders.values()
        placeholders = [self._keys.placeholder, *written, *self._expected.values()]
        placeholders += [self._transaction] if self._transaction else []
        self._statement = CompiledStatement(statement, params, placeholders)

    def execute(
        self,
        pks: Sequence[Any],
        values: Values,
        expected: Values = MappingProxyType({}),
        transaction_id: str | None = None,
    ) -> int | None:
        """Execute the update for these rows; return how many were written.

        ``None``: nothing was sent, because a field turns its value into SQL.
        """
        connection = self._connection
        filled = self._assignments.filled(values, connection)
        if filled is None:
            return None
        filled.update(self._keys.filled(pks))
        for name, placeholder in self._expected.items():
            filled[placeholder] = placeholder.compared(expected[name], connection)
        if self._transaction is not None:
            filled[self._transaction] = transaction_id
        with transaction.mark_for_rollback_on_error(self._using), connection.cursor() as cursor:
            cursor.execute(self._statement.sql, self._statement.params(filled))
            rows: int = cursor.rowcount
        return rows


def _plain_field(model: type[Model], name: str) -> Any:
    """Return a field with a plain comparison; raises ``CannotParametrize`` for another one."""
    field = model._meta.get_field(name)
    if field.is_relation or field.get_lookup("exact") is not Exact:
        raise CannotParametrize
    return field
