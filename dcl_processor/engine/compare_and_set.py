"""Compare-and-set: a row is written only if columns still have the values this worker wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from django.db import connections
from django.db.models import Q

from dcl_processor.candidates.question import Question, these
from dcl_processor.compiled_sql.update import CompiledUpdate
from dcl_processor.locking.row_locks import lock_free, settling, written_parts
from dcl_processor.settlement import writing
from dcl_processor.values import Values

#: Each column, with all values that this worker may have written to it.
Expected = Mapping[str, Sequence[Any]]


def write(question: Question[Any], pk: Any, expected: Expected, values: Values) -> int:
    """Write a row if it has the expected values; return how many rows were written, 0 or 1."""
    # Race: lost lease that writes. A row that another worker has taken over does not match these
    # columns, whichever of the two statements below writes it.
    update, only = _compiled(question, expected, values)
    written = None if update is None else update.execute([pk], values, expected=only)
    return write_all(question, [pk], expected, values) if written is None else written


def statement_if_free(
    question: Question[Any], pk: Any, expected: Expected, values: Values
) -> tuple[str, Sequence[Any]] | None:
    """Return one statement that writes a row unless another session has locked it.

    Like ``write()`` only if the row has the expected values. ``None``: there is no such statement.
    """
    # Race: lost lease that writes. As above.
    update, only = _compiled(question, expected, values)
    return None if update is None else update.if_free(pk, values, only)


def _compiled(
    question: Question[Any], expected: Expected, values: Values
) -> tuple[CompiledUpdate | None, Values]:
    """Return the statement that is compiled once, if there is one, and what it compares."""
    only = {column: known[0] for column, known in expected.items() if len(known) == 1}
    # NULL needs a comparison of its own.
    if len(only) != len(expected) or [1 for each in only.values() if each is None]:
        return None, only
    make = partial(CompiledUpdate, question.model, question.using, values, expected=only)
    return question.writes.to_write(values, ("settle", *only), make), only


def write_all(
    question: Question[Any], pks: Sequence[Any], expected: Expected, values: Values
) -> int:
    """Write to the rows that have the expected values; return how many were written."""
    with settling(question, pks, {*expected, *values}):
        return writing.update_rows(question, pks, values, condition(expected))


def write_free(
    question: Question[Any], pks: Sequence[Any], expected: Expected, values: Values
) -> int:
    """Do the same for the rows that no other session has locked, in a transaction."""
    rows, tables = question.table, written_parts(question.model, {*expected, *values})
    features = connections[question.using].features
    if tables != [question.model] or not features.has_select_for_no_key_update:
        return write_all(question, lock_free(question, pks, tables), expected, values)
    # The lock would be one more message.
    free = rows.filter(these(pks)).order_by().select_for_update(skip_locked=True, no_key=True)
    ours = condition(expected) & Q(pk__in=free.values("pk"))
    return writing.update_rows(question, pks, values, ours)


def held(question: Question[Any], pks: Sequence[Any], expected: Expected) -> set[Any]:
    """Return those of the rows that have the expected values now."""
    rows = question.table.filter(these(pks), condition(expected)).order_by()
    return set(rows.values_list("pk", flat=True))


def condition(expected: Expected) -> Q:
    """Return the expected values as a condition of a query."""
    ours = Q()
    for column, known in expected.items():
        ours &= Q(**{column: known[0]}) if len(known) == 1 else Q(**{f"{column}__in": known})
    return ours
