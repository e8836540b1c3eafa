"""Checks of ``group_by`` and ``in_order``, and of the indexes for them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from textwrap import indent
from typing import Any

from django.core import checks
from django.core.checks import CheckMessage
from django.db import connections
from django.db.models import Q

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
    of, time = suggested(processor, question), time_in_flight(processor, groups)
    is_partial = connections[question.using].features.supports_partial_indexes
    declared = [
        each
        for each in field.model._meta.indexes
        if each.fields and each.fields[0].lstrip("-") in {field.name, field.attname}
        if is_partial or each.condition is None
    ]
    by_time = Q(**{f"{time}__isnull": False})
    has_read = _has_key_first(field) or any(each.condition != by_time for each in declared)
    # The index of a foreign key is not one of the rows in flight: it has those that are done, too.
    has_in_flight = field.unique or any(
        each.condition == by_time or each.fields[1:2] == [time] for each in declared
    )
    in_flight = None if has_in_flight else of.in_flight
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


def _has_key_first(field: Any) -> bool:
    """Return whether a key or a unique constraint begins with the field; the order may be missing.

    An index with a condition counts as well, whatever the condition is.
    """
    meta = field.model._meta
    unique = [*meta.unique_together, *(each.fields for each in meta.total_unique_constraints)]
    return (
        field.db_index
        or field.unique
        or meta.pk_fields[0] == field
        or any(columns[0] in {field.name, field.attname} for columns in unique)
    )
