"""The id of a transaction, which shows that a connection is in the same one as before.

PostgreSQL gives a transaction an id with its first row lock. Asked for by the statement that
locks, the id costs nothing; compared by the statement that flips, it costs nothing either.
"""

from __future__ import annotations

from typing import Any

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Func, QuerySet, TextField
from django.db.models.lookups import Exact

#: What a claim's rows call it, until it is taken off them.
NAME = "dcl_transaction_id"


class TransactionId(Func):
    """The id of the transaction that a statement runs in, savepoints notwithstanding."""

    function = "pg_current_xact_id"
    template = "%(function)s()"
    arity = 0

    def __init__(self) -> None:
        # An xid8, which the drivers hand on as text, and take as text.
        super().__init__(output_field=TextField())


def has_id(connection: BaseDatabaseWrapper) -> bool:
    """Tell whether the database tells its transactions apart."""
    return connection.vendor == "postgresql"


def identified(queryset: QuerySet[Any, Any], using: str) -> QuerySet[Any, Any]:
    """Let the rows carry the transaction's id as their last column, where there is one."""
    if not has_id(connections[using]):
        return queryset
    numbered: QuerySet[Any, Any] = queryset.annotate(**{NAME: TransactionId()})
    return numbered


def within(place: Any) -> Exact[Any]:
    """Return the condition that a statement runs in the transaction that has this id."""
    return Exact(TransactionId(), place)


def current(using: str) -> str:
    """Ask for the id of the transaction that is open."""
    with connections[using].cursor() as cursor:
        cursor.execute("SELECT pg_current_xact_id()")
        number: str = cursor.fetchone()[0]
    return number
