"""Write rows by a statement that is compiled once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import MappingProxyType
from typing import Any

from django.core.exceptions import ValidationError
from django.db import connections, transaction
from django.db.models import Model, QuerySet, TextField, sql

from dcl_processor.values import Values

from .keys import Keys
from .places import (
    NotOpenError,
    Open,
    Template,
    open_values,
    plain_field,
    prepared_key,
    written,
)
from .transaction import within


class Update:
    """An update with an open key and open values.

    ``guard``: columns that must have the values given at execution. ``fenced``: it writes only in
    the transaction whose id is given at execution.
    """

    def __init__(
        self,
        model: type[Model],
        using: str,
        values: Values,
        *,
        guard: Iterable[str] = (),
        many: bool = False,
        fenced: bool = False,
    ) -> None:
        self._using = using
        self._connection = connections[using]
        self._keys = Keys(model, using, many=many)
        self._values = values
        self._open = open_values(model, values)
        self._guard = {name: Open(plain_field(model, name)) for name in guard}
        self._transaction = Open(TextField()) if fenced else None
        rows = QuerySet[Any](model, using=using).filter(self._keys.rows.condition, **self._guard)
        if self._transaction is not None:
            rows = rows.filter(within(self._transaction))
        query: Any = rows.query.chain(sql.UpdateQuery)
        query.add_update_values({**values, **written(self._open)})
        if query.related_updates:
            raise NotOpenError
        statement, params = compiled(query.get_compiler(using))
        places = [self._keys.place, *self._open.values(), *self._guard.values()]
        places += [self._transaction] if self._transaction else []
        self._template = Template(statement, params, places)

    def write(
        self,
        pks: Sequence[Any],
        values: Values,
        guard: Values = MappingProxyType({}),
        transaction_id: str | None = None,
    ) -> int | None:
        """Execute the update for these rows; return how many were written.

        ``None``: nothing was sent, because a field turns its value into SQL.
        """
        connection = self._connection
        filled: dict[Open, Any] = {
            place: place.prepared(values[name], connection) for name, place in self._open.items()
        }
        if any(hasattr(value, "as_sql") for value in filled.values()):
            return None
        filled.update(self._keys.filled(pks))
        for name, place in self._guard.items():
            filled[place] = prepared_key(place, guard[name], connection)
        if self._transaction is not None:
            filled[self._transaction] = transaction_id
        with transaction.mark_for_rollback_on_error(self._using), connection.cursor() as cursor:
            cursor.execute(self._template.sql, self._template.filled(filled))
            rows: int = cursor.rowcount
        return rows


def compiled(compiler: Any) -> tuple[str, Sequence[Any]]:
    """Compile; raises ``NotOpenError`` if a user's field fails on an open place."""
    try:
        statement, params = compiler.as_sql()
    except (ValidationError, AttributeError, TypeError, ValueError) as error:
        # A user's field failed on the place for its value; with a value its own error is raised.
        raise NotOpenError from error
    return statement, params
