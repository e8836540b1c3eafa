"""Which rows wait for their key: they are due, and no run starts them now."""

from __future__ import annotations

from typing import Any

from django.db.models import Count, OuterRef, Q, QuerySet, Subquery, Value
from django.db.models.lookups import Exact

from dcl_processor.keys.claim import in_order
from dcl_processor.keys.columns import column_of
from dcl_processor.keys.limits import mark_of
from dcl_processor.operator.states import NONE, flag
from dcl_processor.options.options import Definition
from dcl_processor.pending.question import Question


def held(processor: Definition[Any], question: Question[Any]) -> Q:
    """Recognise a row whose key has no place left, or whose first row cannot be tried now.

    A key's places are taken by rows at work or in doubt, as far as columns show them.
    """
    if processor.group_by is None:
        return NONE
    column, mark = column_of(processor, "group_by", question.model), mark_of(processor)
    found, at_work = NONE, in_flight(processor, question)
    if at_work is not None:
        keys = at_work.filter(**{f"{column}__isnull": False}).order_by().values(column)
        full = keys.annotate(dcl_rows=Count("pk")).filter(dcl_rows__gte=processor.most_of_a_key)
        found |= Q(**{f"{column}__in": full.values(column)})
    due = processor._due(question.model) if processor.in_order else None
    if due is not None:
        rows = question.unfiltered.using(question.using).filter(**{column: OuterRef(column)})
        first = in_order(rows).annotate(dcl_due=flag(due)).values("dcl_due")[:1]
        found |= Q(Exact(Subquery(first), Value(False)))
    # A row that has lost its worker had its place once, and is taken over by the next run.
    return found if mark is None else found & ~mark.in_flight


def in_flight(processor: Definition[Any], question: Question[Any]) -> QuerySet[Any, Any] | None:
    """Return the rows at work or in doubt; ``None``: only their locks show them."""
    mark = mark_of(processor)
    if mark is None:
        return None
    lapsed = NONE if mark.lapsed is None else mark.lapsed
    return question.table.filter(mark.in_flight, ~lapsed)
