"""Checks that tables have row locks and rollback, and that an update counts the rows it matches.

On MariaDB and MySQL, both depend on the project. MyISAM, MEMORY and Aria accept every statement of
a transaction, lock no row, and keep writes that are rolled back. A server may have tables of both
kinds, so each table is checked once per connection.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

from django.db import connections
from django.db.models import Model

from dcl_processor.candidates.question import Question
from dcl_processor.exceptions import Unsupported

# One table at a time, so that both names are constants and the server opens no other table.
_WITHOUT_TRANSACTIONS = """
    SELECT ENGINE FROM information_schema.TABLES
    WHERE TABLE_SCHEMA = COALESCE(%s, DATABASE()) AND TABLE_NAME = %s
    AND ENGINE NOT IN (SELECT ENGINE FROM information_schema.ENGINES WHERE TRANSACTIONS = 'YES')
"""

# Keyed by the driver's connection, so that the tables are checked again after a reconnect.
_trusted: WeakKeyDictionary[Any, set[type[Model]]] = WeakKeyDictionary()


def refuse_without_transactions(question: Question[Any]) -> None:
    """Raise ``Unsupported`` unless the tables have transactions, and updates count matches."""
    connection = connections[question.using]
    if connection.vendor != "mysql":
        return
    connection.ensure_connection()
    if connection.connection not in _trusted:
        _refuse_changed_rows(connection)
    trusted = _trusted.setdefault(connection.connection, set())
    if question.model in trusted:
        return
    for name in _tables(question.model):
        # The name of a table in another database is `database`.`table`.
        schema, _, table = name.strip("`").rpartition("`.`")
        with connection.cursor() as cursor:
            cursor.execute(_WITHOUT_TRANSACTIONS, [schema or None, table])
            found = cursor.fetchone()
        if found is not None:
            raise Unsupported(
                f"{question.model._meta.label}: expected tables with transactions on "
                f"{question.using!r}, got {table} with the engine {found[0]}, which locks no row "
                f"and rolls nothing back; run ALTER TABLE {table} ENGINE=InnoDB."
            )
    trusted.add(question.model)


def _refuse_changed_rows(connection: Any) -> None:
    flags = connection.get_connection_params().get("client_flag", 2)
    if not flags & 2:  # FOUND_ROWS, which Django sets
        raise Unsupported(
            f"expected the connection {connection.alias!r} to count the rows that an UPDATE "
            f"matches, got OPTIONS with client_flag={flags} without FOUND_ROWS, with which a row "
            "that has these values already counts as not written; remove client_flag, or add "
            "MySQLdb.constants.CLIENT.FOUND_ROWS to it."
        )


def _tables(model: type[Model]) -> Iterator[str]:
    for each in (model, *model._meta.all_parents):
        if not each._meta.proxy:
            yield each._meta.db_table
