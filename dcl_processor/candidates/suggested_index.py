"""Which indexes a processor needs: what the command and the check suggest, so that they agree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from django.db import connections
from django.db.models import Index, Model, Q

from dcl_processor.definition.groups import Groups, groups_of

from .pending_index import pending_index
from .question import Question

if TYPE_CHECKING:
    from dcl_processor.definition.definition import Definition

#: Characters of a name's parts: a name may have 30 on every database.
_PART = 9


@dataclass(frozen=True, slots=True)
class Suggested:
    """The indexes of one processor, and the model whose ``Meta`` is to have them.

    ``model``: that of the rows, or the parent that has the column of ``group_by``. ``read``: serves
    the lock-free reads; ``None``: no index can. ``in_flight``: serves the question for the rows of
    a key that are claimed and not settled; ``None``: without ``group_by``, or without a column that
    shows it.
    """

    model: type[Model]
    read: Index | None
    in_flight: Index | None = None

    @property
    def all(self) -> list[Index]:
        """The indexes that there are."""
        return [index for index in (self.read, self.in_flight) if index is not None]


def suggested(processor: Definition[Any], question: Question[Any]) -> Suggested:
    """Return the indexes for a processor; sends no query.

    Raises ``InvalidOption`` for a ``group_by`` that names no key.
    """
    if processor.group_by is None:
        index = pending_index(question, strict_order=processor.strict_order)
        return Suggested(question.model, index)
    groups = groups_of(processor, question.model)
    index = pending_index(question, group=groups.field)
    return Suggested(groups.field.model, index, _in_flight(processor, question, groups))


def _in_flight(processor: Definition[Any], question: Question[Any], groups: Groups) -> Index | None:
    key, time = groups.field, time_in_flight(processor, groups)
    if time is None:
        return None
    name = f"{key.model._meta.model_name[:_PART]}_{key.name[:_PART]}_in_flight"
    # Django does not make an index with a condition where the database has none.
    if not connections[question.using].features.supports_partial_indexes:
        return Index(fields=[key.name, time], name=name)
    return Index(fields=[key.name], condition=Q(**{f"{time}__isnull": False}), name=name)


def time_in_flight(processor: Definition[Any], groups: Groups) -> str | None:
    """Return the column, in the table of the key, that is not ``NULL`` while a row is in flight."""
    here = {each.name for each in groups.field.model._meta.local_concrete_fields}
    times = (processor.lease.field if processor.lease else None, processor.claimed_at)
    return next((name for name in times if name in here), None)
