"""Look up whether a COMMIT took effect after an error, or after its answer was lost."""

from __future__ import annotations

import time
from typing import Any

from django.db import Error, connections

from dcl_processor.database.connection import reconnected
from dcl_processor.database.contention import is_database_error
from dcl_processor.exceptions import ProcessorError

from .batch import Batch

#: Seconds for which the server is asked again about a transaction that it has not ended yet.
ASK_FOR = 5.0


def is_committed_all_the_same(
    batch: Batch[Any], error: BaseException, *, session: Any, waited: bool = False
) -> bool:
    """Return whether the transaction of the claim was committed, although an error came.

    Only PostgreSQL can tell, by the transaction's id, which the claim returns. ``session``: the
    driver's connection before the delivery; ``waited``: the COMMIT was sent with other statements.
    """
    if batch.transaction_id is None or isinstance(error, ProcessorError):
        return False
    using = batch.question.using
    is_lost = isinstance(error, Exception) and is_database_error(error)
    may_be_committed = waited or (is_lost and reconnected(using, since=session))
    return may_be_committed and _was_committed(connections[using], batch.transaction_id)


def _was_committed(connection: Any, transaction_id: str) -> bool:
    end = time.monotonic() + ASK_FOR
    while True:
        try:
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_xact_status(%s::xid8)", [transaction_id])
                status = cursor.fetchone()[0]
        except Error:
            return False
        if status != "in progress" or time.monotonic() > end:
            return bool(status == "committed")
        time.sleep(0.05)
