"""The id of a transaction, which shows that a connection is in the same one as before.

PostgreSQL gives a transaction an id with its first row lock. The statement that locks returns the
id, and the statement that flips compares it, both at no extra cost.
"""

from __future__ import annotations

from typing import Any

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Func, TextField
from django.db.models.lookups import Exact


class TransactionId(Func):
    """The id of the transaction that a statement runs in; a savepoint does not change it."""

    function = "pg_current_xact_id"
    template = "%(function)s()"
    arity = 0

    def __init__(self) -> None:
        # An xid8, which the drivers return and accept as text.
        super().__init__(output_field=TextField())


def has_id(connection: BaseDatabaseWrapper) -> bool:
    """Return whether the database has transaction ids."""
    return connection.vendor == "postgresql"


def is_in_transaction(transaction_id: Any) -> Exact[Any]:
    """Return the condition that a statement runs in the transaction that has this id.

    ``transaction_id``: a text, or an expression.
    """
    return Exact(TransactionId(), transaction_id)


def current_transaction_id(using: str) -> str:
    """Return the id of the open transaction, by a query."""
    with connections[using].cursor() as cursor:
        cursor.execute("SELECT pg_current_xact_id()")
        number: str = cursor.fetchone()[0]
    return number
