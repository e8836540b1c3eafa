"""Which rows wait for their key: they are due, and no run starts them now."""

from __future__ import annotations

from typing import Any

from django.db.models import Count, F, Q, QuerySet, Window
from django.db.models.functions import RowNumber

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
        pending = question.unfiltered.using(question.using).annotate(dcl_due=flag(due))
        order: Any = in_order(pending).query.order_by
        # Of the keys that have a row that waits, which is the first: by one sort of their rows.
        keys = pending.order_by().filter(dcl_due=False, **{f"{column}__isnull": False})
        rows = pending.order_by().filter(**{f"{column}__in": keys.values(column)})
        place = Window(RowNumber(), partition_by=[F(column)], order_by=[*order])
        first = rows.annotate(dcl_place=place).filter(dcl_place=1, dcl_due=False)
        found |= Q(**{f"{column}__in": first.values(column)})
    # A row that has lost its worker had its place once, and is taken over by the next run.
    return found if mark is None else found & ~mark.in_flight


def in_flight(processor: Definition[Any], question: Question[Any]) -> QuerySet[Any, Any] | None:
    """Return the rows at work or in doubt; ``None``: only their locks show them."""
    mark = mark_of(processor)
    if mark is None:
        return None
    lapsed = NONE if mark.lapsed is None else mark.lapsed
    return question.table.filter(mark.in_flight, ~lapsed)
