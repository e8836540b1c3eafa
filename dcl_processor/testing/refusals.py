"""Refuses a test about locks where it would pass whatever the code does."""

from __future__ import annotations

from django.db import connections

from dcl_processor.exceptions import Unsupported
from dcl_processor.locking.isolation import from_test_case


def refuse_where_nothing_is_tested(using: str, what: str) -> None:
    """Raise ``Unsupported`` unless other sessions see the rows, and can lock them one by one."""
    connection = connections[using]
    if not connection.features.has_select_for_update:
        raise Unsupported(
            f"{what}: expected a database that locks single rows, such as PostgreSQL or MariaDB, "
            f"got {connection.display_name}, which has one lock for all rows, so the test would "
            "test nothing; run it on the database system of production."
        )
    if any(from_test_case(block) for block in connection.atomic_blocks):
        raise Unsupported(
            f"{what}: expected rows that are committed, got a test inside TestCase, whose rows no "
            "other session sees, so it would test nothing; use TransactionTestCase, or "
            "pytest-django's django_db(transaction=True)."
        )
