"""The processor's ``pending`` question, as a test asks it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any, TypeVar

from django.db import connections, router
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Model, QuerySet

from dcl_processor.candidates.question import Question, ask
from dcl_processor.database.contention import is_contention, is_database_error
from dcl_processor.exceptions import InvalidOption, Unsupported
from dcl_processor.locking.isolation import from_test_case
from dcl_processor.processor import BatchProcessor

M = TypeVar("M", bound=Model)


def question_of(processor: BatchProcessor[M], using: str | None) -> Question[M]:
    """Return the user's question, with the processor's own conditions for a row."""
    question: Question[M] = ask(
        processor.pending, label=processor.name, using=using or processor.using, due=processor._due
    )
    return question


def check_row(processor: BatchProcessor[Any], question: Question[Any], row: Any) -> None:
    """Raise ``InvalidOption`` unless the row is of the processor's model."""
    if not isinstance(row, question.model):
        raise InvalidOption(
            f"{processor.name}: expected a row of {question.model._meta.label}, got {row!r}."
        )


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


# --- another session that has a row locked


@contextmanager
def hold_lock(row: Model, *, using: str | None = None) -> Iterator[None]:
    """Hold a row's lock in another session for as long as the block lasts.

    It is the lock that another worker would hold, on its own connection; with multi-table
    inheritance, the parents' rows are locked, too. ``using``: the alias; default: the row's alias.
    Changes nothing.

    Raises ``Unsupported`` inside ``TestCase`` and on a database without row locks, and
    ``AssertionError`` if other sessions do not see the row, or if it is locked already.
    """
    read_from = row._state.db  # noqa: SLF001  # Django's public name for it, documented
    alias = using or read_from or router.db_for_write(type(row), instance=row)
    refuse_where_nothing_is_tested(alias, "hold_lock()")
    # The alias's settings contain the test database's name by now.
    with closing(connections.create_connection(alias)) as session:
        session.set_autocommit(False)
        if not _locked(row, session, alias):
            raise AssertionError(
                f"hold_lock(): expected {row!r} in the database, got no row with the key {row.pk} "
                f"on {alias!r} that another session sees; save the row, and commit."
            )
        try:
            yield
        finally:
            session.rollback()


def _locked(row: Model, session: BaseDatabaseWrapper, alias: str) -> bool:
    model = row._meta.concrete_model
    assert model is not None
    features = session.features
    # Without waiting: if the test itself holds the lock, the wait would never end.
    rows: QuerySet[Any] = QuerySet(model, using=alias).order_by().filter(pk=row.pk)
    rows = rows.select_for_update(
        nowait=features.has_select_for_update_nowait, no_key=features.has_select_for_no_key_update
    )
    sql, params = rows.query.get_compiler(connection=session).as_sql()
    with session.cursor() as cursor:
        try:
            cursor.execute(sql, params)
        except Exception as error:
            if is_database_error(error) and is_contention(error):
                raise AssertionError(
                    f"hold_lock(): expected {row!r} to be free, got one that is locked "
                    "already, or not committed yet."
                ) from error
            raise
        return bool(cursor.fetchall())
