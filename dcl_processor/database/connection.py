"""Whether the session is still there, and a new connection if it is not."""

from __future__ import annotations

import select
from typing import Any

from django.db import Error, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Func, TextField
from django.db.models.lookups import Exact

from dcl_processor import steady as time


def is_connected(using: str) -> bool:
    """Return whether a statement can be sent, on a new connection if the session was ended.

    A server that ends a session notifies the client, so there is something to read although nothing
    was sent. Sends a query only in that case, and after an error.
    """
    connection: Any = connections[using]
    if connection.connection is None or connection.in_atomic_block:
        return True
    if not connection.errors_occurred and not has_news(connection.connection):
        return True
    if connection.is_usable():
        connection.errors_occurred = False
        return True
    return reconnected(using)


#: Seconds for which a run waits for a server that is away, before it calls the next handler.
WAIT_FOR_SERVER = 5.0


def has_come_back(using: str, *, waits: bool) -> bool:
    """Return whether there is a new connection; ``waits``: or soon is."""
    end = time.monotonic() + (WAIT_FOR_SERVER if waits else 0.0)
    while not reconnected(using):
        if time.monotonic() >= end:
            return False
        time.sleep(0.1)
    return True


def has_news(driver: Any) -> bool:
    """Return whether there is something to read although no statement was sent, or it is closed."""
    if not hasattr(driver, "fileno"):
        return False  # SQLite has no session to lose
    try:
        poll = select.poll()
        poll.register(driver.fileno(), select.POLLIN)
        return bool(poll.poll(0))
    except Exception:  # noqa: BLE001  # each driver has an error of its own for a closed connection
        return True


def reconnected(using: str, *, since: Any = None) -> bool:
    """Replace the connection if it was lost; return whether there is a new one.

    ``since``: the driver's connection as it was before the error.
    """
    connection = connections[using]
    if connection.in_atomic_block:
        return False
    # Not close_if_unusable_or_obsolete(): with CONN_MAX_AGE=0 every connection is obsolete, and
    # every error would look like a lost connection.
    if connection.connection is not None and connection.is_usable():
        # Django itself reconnects if the ROLLBACK of a transaction finds that the session is gone.
        return since is not None and connection.connection is not since
    connection.close()
    try:
        connection.ensure_connection()
    except Error:
        return False
    return True


# --- the id of a transaction, which shows that a connection is in the same one as before
#
# PostgreSQL gives a transaction an id with its first row lock. The statement that locks returns the
# id, and the statement that flips compares it, both at no extra cost.


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
