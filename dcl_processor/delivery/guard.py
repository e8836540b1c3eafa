"""Compare-and-set: a row is written only if columns still have the values that we gave them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from django.db.models import Q

from dcl_processor.candidates.pending import Question, these
from dcl_processor.locking.waiting import settling
from dcl_processor.statements.kept import names
from dcl_processor.statements.update import Update

#: Each column, and every value that it may have from us.
Guard = Mapping[str, Sequence[Any]]


def write(question: Question[Any], pk: Any, guard: Guard, values: Mapping[str, Any]) -> int:
    """Write a row if it is ours; return how many were written, 0 or 1."""
    # Race: lost lease that writes. The row of a worker that took it over is not matched.
    only = {column: known[0] for column, known in guard.items() if len(known) == 1}
    # NULL is compared in a way of its own.
    if len(only) == len(guard) and None not in only.values():
        name = "settle", *only, names(values)
        make = partial(Update, question.model, question.using, values, guard=only)
        update = question.statements.get(name, make)
        written = None if update is None else update.write([pk], values, only)
        if written is not None:
            return written
    return write_all(question, [pk], guard, values)


def write_all(
    question: Question[Any], pks: Sequence[Any], guard: Guard, values: Mapping[str, Any]
) -> int:
    """Write those of the rows that are ours, all alike; return how many were written."""
    table = question.table
    with settling(question, pks, {*guard, *values}):
        return table.filter(these(pks), condition(guard)).update(**values)


def condition(guard: Guard) -> Q:
    """Return what recognises a row as ours, as a condition."""
    ours = Q()
    for column, known in guard.items():
        ours &= Q(**{column: known[0]}) if len(known) == 1 else Q(**{f"{column}__in": known})
    return ours
