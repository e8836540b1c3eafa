"""Which rows a claim takes that may choose: the first that can be had of those that come next.

A copy among others would otherwise find out row by row, one statement each, what they have. Queues
in a table take their next row so, from the head (``LIMIT`` with SKIP LOCKED); here the rows are
named, and the keys that nobody could have any more are passed once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

from django.db import connections
from django.db.models import QuerySet

from dcl_processor.candidates.pending import Question
from dcl_processor.statements.keys import Rows

R = TypeVar("R")

#: Rows beside those wanted that a claim may choose among; fewer where each takes a whole question.
OFFERED, OFFERED_SPANNING = 48, 16


@dataclass(frozen=True, slots=True)
class Choice:
    """How many of the rows named are to be taken: the first that are free, as they are named.

    ``by_key``: they are named in the order of their keys, which the database can do without
    sorting. Not an order that the row itself tells: it may have changed since it was read.
    """

    most: int
    by_key: bool

    @classmethod
    def among(cls, pks: Sequence[Any], most: int | None) -> Choice | None:
        """Return the choice, or none when all are wanted."""
        if most is None or most >= len(pks):
            return None
        return cls(most, by_key=_are_ascending(pks))

    def first(self, queryset: QuerySet[Any, R], rows: Rows) -> QuerySet[Any, R]:
        """Leave it at the first so many rows."""
        ordered = queryset.order_by("pk" if self.by_key else rows.order())
        # A reverse() outlives order_by().
        ordered.query.standard_ordering = True
        return ordered[: self.most]

    def reached(self, pks: Sequence[Any], got: Collection[Any]) -> Sequence[Any]:
        """Return the rows that a claim has come to which got these: none behind the last."""
        if len(got) < self.most:
            return pks
        ours = set(got)
        return pks[: 1 + max(place for place, pk in enumerate(pks) if pk in ours)]


def offered(question: Question[Any]) -> int:
    """Return how many rows more than it is to take a claim may name.

    None but where a statement locks nothing but what it returns, however many rows it passes:
    InnoDB locks what it looks at.
    """
    able = connections[question.using].features.has_select_for_no_key_update
    if not able or len(question.model._meta.pk_fields) > 1:
        return 0
    return OFFERED if question.own_table else OFFERED_SPANNING


def _are_ascending(pks: Sequence[Any]) -> bool:
    # Of numbers alone it is known that the database has the same order.
    return all(type(pk) is int for pk in pks) and all(one < next_ for one, next_ in pairwise(pks))
