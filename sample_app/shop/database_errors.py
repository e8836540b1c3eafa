"""Reports database errors that a user can fix, in one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from django.core.management.base import CommandError
from django.db import InterfaceError, OperationalError, connection


@contextmanager
def told_plainly() -> Iterator[None]:
    """Turn a database that does not answer into a CommandError."""
    try:
        yield
    except (OperationalError, InterfaceError) as error:
        reason = str(error).strip().split("\n")[0]
        raise CommandError(
            f"Expected a database that answers, got: {reason}; start it, or correct or unset "
            "DATABASE_URL."
        ) from error


def require_tables() -> None:
    """Raise CommandError unless the shop's tables are there."""
    if "shop_order" not in connection.introspection.table_names():
        raise CommandError(
            "Expected the shop's tables in the database, got none called shop_order; run "
            "'manage.py migrate' first."
        )
