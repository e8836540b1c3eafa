"""Statements of one message, and how a test acts in between."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import connection

from tests import seams

#: Whether the driver sends several statements as one message, and reports each result.
SENDS_SEVERAL = hasattr(getattr(connection, "Database", None), "ClientCursor")


def updates(sql: str) -> bool:
    """Return whether a statement updates rows, and does nothing else with them."""
    return sql.startswith(
        ("UPDATE", "WITH dcl_free", "WITH dcl_mine", "SET STATEMENT innodb_lock_wait")
    )


def each_alone(cursor: Any, statements: Sequence[Any]) -> list[Any]:
    """Send each statement as a message of its own, so that a test can act in between."""
    answers: list[Any] = []
    for each in statements:
        cursor.execute(each.sql, each.params)
        answers.append(cursor.fetchall() if cursor.description else cursor.rowcount)
    return answers


@contextmanager
def separately() -> Iterator[None]:
    """Send the statements of one message one by one, so that a test can act in between.

    They wait as if no wrapper of a test looked at them.
    """
    with pytest.MonkeyPatch.context() as patch:
        seams.replace(patch, seams.SEND_TOGETHER, each_alone)
        seams.replace(patch, seams.IS_OBSERVED, lambda *_: False)
        yield
