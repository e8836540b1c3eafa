"""Which rows a claim takes that may choose: the first that can be had of those that come next.

A copy among others would otherwise find out row by row, one statement each, what they have. Queues
in a table take their next row so, from the head (``LIMIT`` with SKIP LOCKED); here the rows are
named, and the keys that nobody could have any more are passed once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, TypeVar

from django.db import connections
from django.db.models import QuerySet

from dcl_processor.candidates.pending import Question

R = TypeVar("R")

#: Rows beside those wanted that a claim may choose among; fewer where each takes a whole question.
CHOICE, CHOICE_SPANNING = 48, 16


def choice(question: Question[Any]) -> int:
    """Return how many rows more than it is to take a claim may name.

    None but where a statement locks nothing but what it returns, however many rows it passes:
    InnoDB locks what it looks at.
    """
    able = connections[question.using].features.has_select_for_no_key_update
    if not able or question.plain_order is None or len(question.model._meta.pk_fields) > 1:
        return 0
    return CHOICE if question.own_table else CHOICE_SPANNING


def first(
    question: Question[Any], queryset: QuerySet[Any, R], most: int | None
) -> QuerySet[Any, R]:
    """Leave it at the first so many rows in the question's order."""
    if most is None:
        return queryset
    return queryset.order_by(*question.plain_order or ())[:most]


def reached(pks: Sequence[Any], got: Collection[Any], most: int | None) -> Sequence[Any]:
    """Return the rows that a claim which got these has come to: it went no further than it had to.

    Another session may change what the order is by. A row that is then taken for one that was
    passed is looked at later, as all those are that were not got.
    """
    if most is None or len(got) < most:
        return pks
    ours = set(got)
    return pks[: 1 + max(place for place, pk in enumerate(pks) if pk in ours)]
