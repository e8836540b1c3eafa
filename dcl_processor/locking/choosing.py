"""Which rows a claim takes if it may choose: the first free ones of those that come next.

Otherwise a worker would find out row by row, with one statement each, which rows other workers
have. Queues in a table take their next row from the head in this way (``LIMIT`` with SKIP LOCKED);
here the statement names the rows, and passes once over keys that are no longer available.
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

#: Additional rows that a claim may choose among; fewer if each needs the whole question.
OFFERED, OFFERED_SPANNING = 48, 16


@dataclass(frozen=True, slots=True)
class Choice:
    """How many of the named rows to take: the first free ones, in the order named.

    ``by_key``: they are named in the order of their keys, which the database returns without
    sorting. The order never depends on the row's values, which may have changed since the read.
    """

    most: int
    by_key: bool

    @classmethod
    def among(cls, pks: Sequence[Any], most: int | None) -> Choice | None:
        """Return the choice, or ``None`` if all rows are wanted."""
        if most is None or most >= len(pks):
            return None
        return cls(most, by_key=_are_ascending(pks))

    def first(self, queryset: QuerySet[Any, R], rows: Rows) -> QuerySet[Any, R]:
        """Limit the queryset to the first ``most`` rows."""
        ordered = queryset.order_by("pk" if self.by_key else rows.order())
        # order_by() does not undo a reverse().
        ordered.query.standard_ordering = True
        return ordered[: self.most]

    def reached(self, pks: Sequence[Any], got: Collection[Any]) -> Sequence[Any]:
        """Return the rows that a claim has reached: those up to the last one that it got."""
        if len(got) < self.most:
            return pks
        ours = set(got)
        return pks[: 1 + max(place for place, pk in enumerate(pks) if pk in ours)]


def offered(question: Question[Any]) -> int:
    """Return how many additional rows a claim may name.

    0 unless a statement locks only the rows that it returns, however many it passes: InnoDB locks
    all rows that it reads.
    """
    able = connections[question.using].features.has_select_for_no_key_update
    if not able or len(question.model._meta.pk_fields) > 1:
        return 0
    return OFFERED if question.own_table else OFFERED_SPANNING


def _are_ascending(pks: Sequence[Any]) -> bool:
    # Only numbers are known to have the same order in the database.
    return all(type(pk) is int for pk in pks) and all(one < next_ for one, next_ in pairwise(pks))
