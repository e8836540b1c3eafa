"""The processor's ``pending`` question, as a test asks it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, TypeVar

from django.db import connections
from django.db.models import Model

from dcl_processor.candidates.question import Question, ask, these
from dcl_processor.exceptions import InvalidOption, Unsupported
from dcl_processor.locking.isolation import from_test_case
from dcl_processor.processor import BatchProcessor

M = TypeVar("M", bound=Model)


def question_of(processor: BatchProcessor[M], using: str | None) -> Question[M]:
    """Return the user's question, with the processor's own conditions for a row."""
    question: Question[M] = ask(
        processor.pending,
        label=processor.name,
        using=using or processor.using,
        due=processor._due,
    )
    return question


def pending_keys(question: Question[Any], pks: Collection[Any] = ()) -> list[Any]:
    """Return the keys of the rows that may be tried now, or those of ``pks`` that are pending."""
    rows = question.unfiltered.filter(these(pks)) if pks else question.queryset
    return list(dict.fromkeys(rows.values_list("pk", flat=True)))


def check_rows(
    processor: BatchProcessor[Any], question: Question[Any], rows: Iterable[Any]
) -> None:
    """Raise ``InvalidOption`` unless the rows are of the processor's model."""
    for row in rows:
        if not isinstance(row, question.model):
            raise InvalidOption(
                f"{processor.name}: expected rows of {question.model._meta.label}, got {row!r}."
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
