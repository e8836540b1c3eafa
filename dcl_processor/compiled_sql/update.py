"""Write rows by a statement that is compiled once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import MappingProxyType
from typing import Any

from django.db import connections, transaction
from django.db.models import IntegerField, Model, QuerySet, TextField, Value, sql
from django.db.models.lookups import Exact

from dcl_processor.database.connection import is_in_transaction
from dcl_processor.values import Values

from .placeholders import (
    Assignments,
    CannotParametrize,
    CompiledStatement,
    KeyPlaceholder,
    Placeholder,
    compiled,
)

#: The text of the error with which a checked statement fails; ``LOST``: in another transaction;
#: ``MORE``: it wrote to more rows than it names.
FLIP, LOST, MORE = "dcl_flip:", "lost", "more"

#: The text of the error with which a look after a flip fails.
PENDING = "dcl_pending:"

_FLIPPED = "dcl_flipped"
_IS_SAME = "pg_current_xact_id() = %s::xid8"


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
        expected: Iterable[str] = (),
        *,
        many: bool = False,
        fenced: bool = False,
    ) -> None:
        self._using = using
        self._connection = connections[using]
        self._keys = KeyPlaceholder(model, using, many=many)
        self._assignments = Assignments(model, using, values)
        self._expected = {name: Placeholder(_plain_field(model, name)) for name in expected}
        self._fence, self._number = Placeholder(TextField()), Placeholder(IntegerField())
        self._fenced = fenced
        rows = QuerySet[Any](model, using=using).filter(self._keys.condition, **self._expected)
        if fenced:
            rows = rows.filter(is_in_transaction(self._fence))
        query: Any = rows.query.chain(sql.UpdateQuery)
        query.add_update_values(self._assignments.columns)
        statement, params = compiled(query.get_compiler(using))
        written = self._assignments.placeholders.values()
        placeholders = [*written, *self._expected.values()]
        placeholders += [self._fence] if fenced else []
        self._statement = CompiledStatement(statement, params, self._keys, placeholders)
        self._free = self._if_free(rows, placeholders) if expected and not many else None
        self._model = model
        self._check: CompiledStatement | None = None

    def _if_free(
        self, rows: QuerySet[Any], placeholders: Sequence[Placeholder]
    ) -> CompiledStatement | None:
        """Return the statement that writes the row unless another session has locked it.

        On MariaDB it fails if it would wait. ``None``: the database has no such statement.
        """
        connection, meta = self._connection, rows.model._meta
        if connection.features.has_select_for_no_key_update:
            quote = connection.ops.quote_name
            table, key = quote(meta.db_table), quote(str(meta.pk_fields[0].column))
            named = rows.order_by().values_list("pk").query
            select, keys = compiled(named.get_compiler(self._using))
            every: Any = QuerySet[Any](rows.model, using=self._using).query.chain(sql.UpdateQuery)
            every.add_update_values(self._assignments.columns)
            update, values = compiled(every.get_compiler(self._using))
            # Materialised, or the planner may lock one row and update another.
            statement = (
                f"WITH dcl_free (free) AS MATERIALIZED ({select} FOR NO KEY UPDATE SKIP LOCKED) "
                f"{update} FROM dcl_free WHERE {table}.{key} = dcl_free.free"
            )
            return CompiledStatement(statement, [*keys, *values], self._keys, placeholders)
        if getattr(connection, "mysql_is_mariadb", False):
            statement = f"SET STATEMENT innodb_lock_wait_timeout = 0 FOR {self._statement.sql}"
            params = self._statement.parameters
            return CompiledStatement(statement, params, self._keys, placeholders)
        return None

    def _make_check(self) -> CompiledStatement:
        named = QuerySet[Any](self._model, using=self._using).filter(self._keys.condition)
        found = named.order_by().values_list(Value(1)).query.get_compiler(self._using)
        existing, keys = compiled(found)
        params = [*self._statement.parameters, self._number, self._fence, self._number, *keys]
        sql = checked_sql(self._statement.sql, existing)
        return CompiledStatement(sql, params, self._keys, [self._fence, self._number])

    def checked(
        self, pks: Sequence[Any], values: Values, transaction_id: str
    ) -> tuple[str, Sequence[Any]] | None:
        """Return a statement that writes these rows, and fails unless all that exist are written.

        The error has the text ``FLIP``, and then ``LOST`` if the transaction is another one.
        ``None``: a field turns its value into SQL.
        """
        known = self._assignments
        assigned = known.last_filled if values is known.last else known.filled(values)
        if not self._fenced or assigned is None:
            return None
        checked = self._check = self._check or self._make_check()
        filled = {**assigned, self._fence: transaction_id, self._number: len(pks)}
        return checked.sql, checked.params(pks, filled)

    def statement(
        self,
        pks: Sequence[Any],
        values: Values,
        expected: Values = MappingProxyType({}),
        transaction_id: str | None = None,
    ) -> tuple[str, Sequence[Any]] | None:
        """Return the update for these rows; ``None``: a field turns its value into SQL."""
        filled = self._filled(values, expected, transaction_id)
        if filled is None:
            return None
        return self._statement.sql, self._statement.params(pks, filled)

    def if_free(self, pk: Any, values: Values, expected: Values) -> tuple[str, Any] | None:
        """Return the update for a row that hardly waits for its lock; ``None``: there is none."""
        if self._free is None or (filled := self._filled(values, expected, None)) is None:
            return None
        return self._free.sql, self._free.params([pk], filled)

    def execute(
        self,
        pks: Sequence[Any],
        values: Values,
        transaction_id: str | None = None,
        expected: Values = MappingProxyType({}),
    ) -> int | None:
        """Execute the update for these rows; return how many were written.

        ``None``: nothing was sent, because a field turns its value into SQL.
        """
        statement = self.statement(pks, values, expected, transaction_id)
        if statement is None:
            return None
        connection = self._connection
        with transaction.mark_for_rollback_on_error(self._using), connection.cursor() as cursor:
            cursor.execute(*statement)
            rows: int = cursor.rowcount
        return rows

    def _filled(
        self, values: Values, expected: Values, transaction_id: str | None
    ) -> dict[Placeholder, Any] | None:
        known = self._assignments
        assigned = known.last_filled if values is known.last else known.filled(values)
        if assigned is None:
            return None
        compared = {
            each: each.output_field.get_db_prep_value(expected[name], self._connection)
            for name, each in self._expected.items()
        }
        return {**assigned, **compared, self._fence: transaction_id}


def checked_sql(update: str, existing: str) -> str:
    """Return a statement that executes an update, and fails unless it writes all rows.

    ``existing``: selects the rows that still exist. Parameters between those of the two: the number
    of rows, the id of the transaction, and the number again.
    """
    # Race: flip without work. The COMMIT is in the same message, and only an error skips it. The
    # cast is that error. It depends on the count, and so is not evaluated before it.
    return (
        f"WITH {_FLIPPED} AS ({update} RETURNING 1) "  # noqa: S608  # as above
        f"SELECT CAST(CASE WHEN count(*) = %s THEN '0' WHEN NOT {_IS_SAME} THEN '{FLIP}{LOST}' "
        f"WHEN count(*) > %s THEN '{FLIP}{MORE}' "
        f"WHEN count(*) = (SELECT count(*) FROM ({existing}) AS dcl_existing) THEN '0' "
        f"ELSE '{FLIP}' END AS integer) FROM {_FLIPPED}"
    )


#: A statement that fails unless the transaction has the id that is its parameter.
# Race: flip without work. It is the flip of a row whose handler has flipped it.
FENCE_SQL = f"SELECT CAST(CASE WHEN {_IS_SAME} THEN '0' ELSE '{FLIP}{LOST}' END AS integer)"


def look_sql(select: str) -> str:
    """Return a statement that fails if another one, a SELECT, returns a row."""
    # The COMMIT is behind it in the same message, and only an error skips it.
    return (
        f"SELECT CAST(CASE count(*) WHEN 0 THEN '0' ELSE '{PENDING}' END AS integer) "  # noqa: S608  # as above
        f"FROM ({select}) AS dcl_pending"
    )


def _plain_field(model: type[Model], name: str) -> Any:
    """Return a field with a plain comparison; raises ``CannotParametrize`` for another one."""
    field = model._meta.get_field(name)
    if field.is_relation or field.get_lookup("exact") is not Exact:
        raise CannotParametrize
    return field
