"""Write several rows by one statement, in which each row has values of its own.

PostgreSQL joins the rows to a list of values, which it hashes. Elsewhere a ``CASE`` over the
primary key selects each value, as in Django's ``bulk_update()``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from django.core.exceptions import FullResultSet
from django.db import connections, transaction
from django.db.models import Expression, Model, QuerySet, Value, sql

from dcl_processor.values import Values

from .update import checked_sql

#: The list of values in the statement. Its columns have numbers: two long names may begin alike,
#: and PostgreSQL cuts a name.
_GIVEN = "dcl_given"

#: A cast to a type with a length would cut a text that is too long, where an assignment is refused,
#: so the length is left out.
_TYPES = """
SELECT attname, format_type(atttypid, -1) FROM pg_attribute
WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped
"""


class OwnColumn:
    """A column of which one statement can write another value to each row.

    ``is_own``: the model's own table has it; ``fits``: whether one statement can, which depends on
    the field and on the database.
    """

    def __init__(self, model: type[Model], using: str, name: str) -> None:
        self._connection: Any = connections[using]
        self.field: Any = model._meta.get_field(name)
        self.is_own = is_own(model, name)
        self.fits = (
            self.is_own
            and len(model._meta.pk_fields) == 1
            # Adds SQL around its value; Django 6.1 uses the second name.
            and not hasattr(self.field, "get_placeholder")
            and not hasattr(self.field, "get_placeholder_sql")
            and self._leaves_expressions()
        )

    def _leaves_expressions(self) -> bool:
        """Return whether the field writes an expression as it is.

        An encrypting field may take it for a value, and write its text to all rows.
        """
        probe = OwnValues(self.field, {})
        try:
            saved = self.field.get_db_prep_save(probe, self._connection)
        except Exception:  # noqa: BLE001  # the code of a user's field
            return False
        return saved is probe

    def prepared(self, value: Any) -> Any:
        """Return a value in the database's form; raises what the field raises."""
        return self.field.get_db_prep_save(value, self._connection)


def is_own(model: type[Model], name: str) -> bool:
    """Return whether a column is in the model's own table, and not in that of a parent."""
    field: Any = model._meta.get_field(name)
    return field.model._meta.concrete_model is model


class OwnValues(Expression):
    """The values of one column for several rows, by their keys, in the database's form.

    ``number``: of the column in a list of values; ``types``: of the table's columns.
    """

    def __init__(
        self,
        field: Any,
        values: Mapping[Any, Any],
        number: int = 0,
        types: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(output_field=field)
        self.values = values
        self.name = f"dcl_{number}"
        self.types = types

    def resolve_expression(self, *_: Any, **__: Any) -> OwnValues:
        return self  # it names no column but its row's key

    def relabeled_clone(self, change_map: Any) -> OwnValues:  # noqa: ARG002  # Django's signature
        return self  # as above

    def as_sql(self, compiler: Any, connection: Any) -> tuple[str, Any]:  # noqa: ARG002  # as above
        quote = connection.ops.quote_name
        if _joins(connection):
            return f"{_GIVEN}.{self.name}", []
        meta = self.output_field.model._meta
        key = meta.pk_fields[0]
        whens = " ".join(["WHEN %s THEN %s"] * len(self.values))
        params = [
            each
            for pk, value in self.values.items()
            for each in (key.get_db_prep_value(pk, connection), value)
        ]
        return f"CASE {quote(meta.db_table)}.{quote(str(key.column))} {whens} END", params

    # Compared by identity, because the values of users' fields may define any comparison.
    __eq__ = object.__eq__
    __hash__ = object.__hash__


def types(model: type[Model], using: str) -> Mapping[str, str]:
    """Return the types of a table's columns by name, if a list of values has to name them.

    A column may have another type than its field: an enumeration under a text, for instance.
    """
    connection: Any = connections[using]
    if not _joins(connection):
        return {}
    with connection.cursor() as cursor:
        cursor.execute(_TYPES, [connection.ops.quote_name(model._meta.db_table)])
        return dict(cursor.fetchall())


def _joins(connection: Any) -> bool:
    """Return whether a statement joins a list of values, because a CASE would need a cast."""
    return bool(connection.features.requires_casted_case_in_updates)


def own_values(values: Values) -> dict[str, OwnValues]:
    """Return those of the values that differ from row to row."""
    return {name: each for name, each in values.items() if type(each) is OwnValues}


def statement(
    rows: QuerySet[Any, Any], pks: Sequence[Any], values: Values
) -> tuple[str, Sequence[Any]] | None:
    """Return the statement that joins these of the rows to a list of their values.

    ``rows``: a queryset on the model's own table alone. ``None``: no value is a row's own, or the
    database has another statement for it, which the queryset's ``update()`` sends.
    """
    own, connection = [*own_values(values).values()], connections[rows.db]
    if not own or not _joins(connection):
        return None
    query: Any = QuerySet[Any](rows.model, using=rows.db).query.chain(sql.UpdateQuery)
    query.add_update_values(values)
    compiler = query.get_compiler(rows.db)
    update, params = compiler.as_sql()
    quote, meta = connection.ops.quote_name, rows.model._meta
    key = meta.pk_fields[0]
    columns = [str(key.column), *(str(each.output_field.column) for each in own)]
    first = ", ".join(f"CAST(%s AS {own[0].types[each]})" for each in columns)
    others = f", ({', '.join(['%s'] * len(columns))})" * (len(pks) - 1)
    names = ", ".join(["dcl_key", *(each.name for each in own)])
    given = [
        each
        for pk in pks
        for each in (key.get_db_prep_value(pk, connection), *(column.values[pk] for column in own))
    ]
    where, conditions = _condition(compiler, rows)
    table, column = quote(meta.db_table), quote(str(key.column))
    joined = (
        f"{update} FROM (VALUES ({first}){others}) AS {_GIVEN} ({names}) "
        f"WHERE {table}.{column} = {_GIVEN}.dcl_key{where}"
    )
    return joined, [*params, *given, *conditions]


def checked(
    rows: QuerySet[Any, Any],
    existing: QuerySet[Any, Any],
    pks: Sequence[Any],
    values: Values,
    transaction_id: str,
) -> tuple[str, Sequence[Any]] | None:
    """Return the statement that fails, too, unless all rows that exist are written.

    ``rows``: those that may be written, as in ``statement()``; ``existing``: those with these keys.
    """
    joined = statement(rows, pks, values)
    if joined is None:
        return None
    update, params = joined
    found = existing.order_by().values_list(Value(1)).query.get_compiler(rows.db)
    counted, keys = found.as_sql()
    all_params = [*params, len(pks), *keys, transaction_id]
    return checked_sql(update, counted), all_params


def _condition(compiler: Any, rows: QuerySet[Any, Any]) -> tuple[str, Sequence[Any]]:
    try:
        where, params = compiler.compile(rows.query.where)
    except FullResultSet:
        return "", ()
    return f" AND {where}", params


def execute(joined: str, params: Sequence[Any], using: str) -> int:
    """Execute the statement; return how many rows were written."""
    with transaction.mark_for_rollback_on_error(using), connections[using].cursor() as cursor:
        cursor.execute(joined, params)
        written: int = cursor.rowcount
    return written
