"""Checks of ``group_by`` and ``in_order``, and of the indexes for them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from textwrap import indent
from typing import Any

from django.core import checks
from django.core.checks import CheckMessage
from django.core.exceptions import FieldError
from django.db import connections
from django.db.models import F, Q, QuerySet
from django.db.models.expressions import OrderBy
from django.db.models.lookups import Exact
from django.db.models.sql.where import AND, OR, WhereNode

from dcl_processor.candidates.groups import refuse_order
from dcl_processor.candidates.pending_index import imports, source, suggested, time_in_flight
from dcl_processor.candidates.question import Question
from dcl_processor.definition.groups import Groups, groups_of
from dcl_processor.locking.key_lock import refuse_database, refuse_without_skip_locked
from dcl_processor.processor import BatchProcessor

from .questions import refusals


def check(
    processor: BatchProcessor[Any], question: Question[Any], *, ask: bool
) -> Iterator[CheckMessage]:
    """Yield what keeps the processor's keys from working, or may stop one of them for good.

    Connects to the database only if ``ask``.
    """
    if processor.group_by is None:
        return
    found = [
        *refusals(
            processor,
            partial(groups_of, processor, question.model),
            "The key is a column of the model, or a forward relation.",
            "dcl_processor.E015",
        ),
        *refusals(
            processor,
            partial(_refuse_database, processor, question, ask=ask),
            "Set lock_related where the key is a foreign key, or leave group_by out.",
            "dcl_processor.E016",
        ),
    ]
    if processor.in_order:
        found += refusals(
            processor,
            partial(refuse_order, question, processor.name),
            "An order by other tables may change while a row of the key is handled.",
            "dcl_processor.E017",
        )
    yield from found
    if not found:
        yield from _check_indexes(processor, question, groups_of(processor, question.model))
    if not processor.in_order:
        return
    if processor.retry is None or not processor._has_dead_letter:
        yield checks.Warning(
            "in_order without retry and failed: a row that always fails stops its key for good, "
            "because no row behind it is handled.",
            hint="Set retry=Retry(…) and failed={…}, which takes a row that is given up on out of "
            "pending.",
            obj=processor.name,
            id="dcl_processor.W006",
        )


def _refuse_database(processor: BatchProcessor[Any], question: Question[Any], *, ask: bool) -> None:
    refuse_database(question, processor.name, related=processor.lock_related)
    if ask and processor.lock_related:
        refuse_without_skip_locked(question.using, processor.name)


# --- the indexes: one of all pending rows, and one of those in flight


#: What each ``models.py`` has already.
_MODELS = "from django.db import models"


def _check_indexes(
    processor: BatchProcessor[Any], question: Question[Any], groups: Groups
) -> Iterator[CheckMessage]:
    """Yield a warning with the indexes to add, unless those of the model are enough."""
    field = groups.field
    if not field.model._meta.managed:
        return
    of = suggested(processor, question)
    has_read = _has_index(question, field)
    in_flight = None if _has_in_flight(processor, question, groups) else of.in_flight
    indexes = [each for each in (None if has_read else of.read, in_flight) if each is not None]
    if has_read and in_flight is None:
        return
    needed = {line for index in indexes for line in imports(index)} - {_MODELS}
    head = ", with ".join(["Add to the indexes in its Meta", *sorted(needed)])
    listed = indent(",\n".join(map(source, indexes)), "    ")
    missing = (
        "without an index of the rows in flight that begins with it: each claim reads all rows of "
        "the key, also those that are done, of"
        if has_read
        else "without an index that begins with it and has all pending rows: each question about "
        "keys, or about rows of a key, reads the whole table of"
    )
    yield checks.Warning(
        f"group_by={processor.group_by!r} {missing} {field.model._meta.label}.",
        hint=f"{head}:\n{listed},",
        obj=processor.name,
        id="dcl_processor.W007",
    )


def _has_index(question: Question[Any], field: Any) -> bool:
    """Return whether an index of all pending rows begins with the field.

    Whether the order comes behind it is not asked: an index of a foreign key is enough.
    """
    meta = field.model._meta
    if field.db_index or field.unique or meta.pk_fields[0] == field:
        return True
    names = {field.name, field.attname}
    if any(columns[0] in names for columns in meta.unique_together):
        return True
    found = [each for each in (*meta.indexes, *meta.constraints) if _first(each) in names]
    conditions = [getattr(each, "condition", None) for each in found]
    # Whether pending has each part of the condition, as it is written.
    return any(_has_parts(each, question.unfiltered, question, field) for each in conditions)


def _has_in_flight(processor: BatchProcessor[Any], question: Question[Any], groups: Groups) -> bool:
    """Return whether an index has the rows of a key in flight, and few others.

    The index of a foreign key does not count: it has all rows of a key, and most of them are done.
    """
    field, time = groups.field, time_in_flight(processor, groups)
    if time is None or field.unique or field.model._meta.pk_fields == [field]:
        return True
    # What the question for these rows implies.
    has_time = Q(**{f"{time}__isnull": False}) & Q(groups.in_flight or Q())
    asked: QuerySet[Any] = QuerySet(question.model).filter(has_time)
    names = {field.name, field.attname}
    return any(
        _first(each) in names
        and (each.condition is not None or each.fields[1:2] == [time])
        and _has_parts(each.condition, asked, question, field)
        for each in field.model._meta.indexes
    )


def _has_parts(
    condition: Q | None, asked: QuerySet[Any], question: Question[Any], field: Any
) -> bool:
    """Return whether a queryset has each part of an index's condition, as it is written."""
    if condition is None:
        return True
    if not connections[question.using].features.supports_partial_indexes:
        return False
    try:
        needed = QuerySet(field.model).filter(condition).query.where
    except FieldError:
        return False  # which the migration will report
    return _implies(asked.query.where, needed)


def _implies(asked: Any, needed: Any) -> bool:
    """Return whether each part of a condition is a part of the one that is asked."""
    parts = [*_parts(asked)]
    return all(
        part in parts or any(_implies_either(each, part) for each in parts)
        for part in _parts(needed)
    )


def _implies_either(asked: Any, needed: Any) -> bool:
    """Return whether each branch of an OR implies a branch of the other one."""
    if not all(
        isinstance(each, WhereNode) and each.connector == OR and not each.negated
        for each in (asked, needed)
    ):
        return False
    return all(any(_implies(ours, their) for their in needed.children) for ours in asked.children)


def _parts(node: Any) -> Iterator[Any]:
    """Yield what a condition joins by AND, and ``NOT flag`` as ``flag = false``."""
    if not isinstance(node, WhereNode):
        yield node
    elif node.connector == AND and not node.negated:
        for child in node.children:
            yield from _parts(child)
    else:
        match node.children:
            case [Exact(rhs=bool(flag)) as only] if node.negated:
                yield Exact(only.lhs, not flag)
            case _:
                yield node


def _first(index: Any) -> str | None:
    """Return the first column of an index or of a unique constraint."""
    names = getattr(index, "fields", ())
    if names:
        return str(names[0]).lstrip("-")
    expressions = getattr(index, "expressions", ())
    first = expressions[0] if expressions else None
    first = first.expression if isinstance(first, OrderBy) else first
    return getattr(first, "name", None) if isinstance(first, F) else None
