"""What a claim refuses on MariaDB and MySQL: tables and servers with which it locks nothing."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from django.db import connections
from django.db.models import Model

from dcl_processor.pending.question import Question
from dcl_processor.report.exceptions import Unsupported

# One table at a time, so that both names are constants and the server opens no other table.
_WITHOUT_TRANSACTIONS = """
    SELECT ENGINE FROM information_schema.TABLES
    WHERE TABLE_SCHEMA = COALESCE(%s, DATABASE()) AND TABLE_NAME = %s
    AND ENGINE NOT IN (SELECT ENGINE FROM information_schema.ENGINES WHERE TRANSACTIONS = 'YES')
"""

# Keyed by the driver's connection, so that the tables are checked again after a reconnect.
_trusted: WeakKeyDictionary[Any, set[type[Model]]] = WeakKeyDictionary()


def refuse_without_locks(question: Question[Any]) -> None:
    """Raise ``Unsupported`` unless the tables have transactions, and the server row locks.

    MyISAM, MEMORY and Aria accept every statement of a transaction, lock no row, and keep writes
    that are rolled back. A server may have tables of both kinds.
    """
    connection: Any = connections[question.using]
    if connection.vendor != "mysql":
        return
    connection.ensure_connection()
    if connection.connection not in _trusted:
        _refuse_server(connection)
        _trusted[connection.connection] = set()
    trusted, model = _trusted[connection.connection], question.model
    if model in trusted:
        return
    for each in (model, *model._meta.all_parents):
        # The name of a table in another database is `database`.`table`.
        schema, _, table = each._meta.db_table.strip("`").rpartition("`.`")
        with connection.cursor() as cursor:
            cursor.execute(_WITHOUT_TRANSACTIONS, [schema or None, table])
            found = cursor.fetchone()
        if found is not None:
            raise Unsupported(
                f"{model._meta.label}: expected tables with transactions on {question.using!r}, "
                f"got {table} with the engine {found[0]}, which locks no row and rolls nothing "
                f"back; run ALTER TABLE {table} ENGINE=InnoDB."
            )
    trusted.add(model)


def _refuse_server(connection: Any) -> None:
    if "tidb" in connection.mysql_server_info.lower():
        raise Unsupported(
            f"expected a database on {connection.alias!r} that keeps SKIP LOCKED, got "
            f"{connection.mysql_server_info}, which accepts these words and ignores them, so that "
            "two workers would handle one row; use PostgreSQL, MariaDB or MySQL."
        )
