"""Which rows wait for their key: they are due, and no run starts them now."""

from __future__ import annotations

from typing import Any

from django.db.models import Count, F, Q, Window
from django.db.models.functions import RowNumber

from dcl_processor.keys.claim import in_order
from dcl_processor.keys.columns import column_of, mark_of
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
    found, has_key = NONE, {f"{column}__isnull": False}
    if mark is not None:
        at_work = question.table.filter(mark.in_flight, ~(mark.lapsed or NONE), **has_key)
        rows = at_work.order_by().values(column).annotate(dcl_rows=Count("pk"))
        full = rows.filter(dcl_rows__gte=processor.most_of_a_key)
        found |= Q(**{f"{column}__in": full.values(column)})
    due = processor._due(question.model)
    if processor.in_order and due is not None:
        pending = question.unfiltered.using(question.using).annotate(dcl_due=flag(due))
        order: Any = in_order(pending).query.order_by
        # Of the keys that have a row that waits, which is the first: by one sort of their rows.
        keys = pending.order_by().filter(dcl_due=False, **has_key)
        rows = pending.order_by().filter(**{f"{column}__in": keys.values(column)})
        place = Window(RowNumber(), partition_by=[F(column)], order_by=[*order])
        first = rows.annotate(dcl_place=place).filter(dcl_place=1, dcl_due=False)
        found |= Q(**{f"{column}__in": first.values(column)})
    # A row that has lost its worker had its place once, and is taken over by the next run.
    return found & ~mark.in_flight if mark is not None else found
