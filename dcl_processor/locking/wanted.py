"""Which rows a claim takes: all those that are named, or the first free ones of them.

Without such a choice a worker would find out row by row, with one statement each, which rows other
workers have. Queues in a table take their next row from the head in this way (``LIMIT`` with SKIP
LOCKED); here the statement names the rows, and passes once over keys that are no longer available.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any, TypeVar

from django.db import connections
from django.db.models import QuerySet

from dcl_processor.candidates.question import Question, RowFilter
from dcl_processor.definition.groups import Key

R = TypeVar("R")

#: Additional rows that a claim may choose among; fewer if each needs the whole question.
SPARE, SPARE_SPANNING = 48, 16


class Wanted:
    """The rows that a claim may take, in this order: the first ``limit`` of them that are free.

    ``limit``: all of them by default. ``choice``: ``None`` if all rows are wanted; otherwise how
    many, and whether they are named in the order of their keys, which the database returns without
    sorting. The order never depends on the row's values, which may have changed since the read.
    ``keys``: those of the rows, if they are in groups; they are locked before.
    """

    __slots__ = ("choice", "keys", "limit", "pks")

    def __init__(
        self,
        pks: Sequence[Any],
        limit: int | None = None,
        *,
        keys: Mapping[Any, Key] = MappingProxyType({}),
    ) -> None:
        self.pks = pks
        self.keys = keys
        self.limit = len(pks) if limit is None else limit
        self.choice = (
            (limit, _are_ascending(pks)) if limit is not None and limit < len(pks) else None
        )

    def first(self, queryset: QuerySet[Any, R], rows: RowFilter) -> QuerySet[Any, R]:
        """Limit the queryset to the first ``limit`` rows, if more are named."""
        if self.choice is None:
            return queryset
        limit, by_key = self.choice
        ordered = queryset.order_by("pk" if by_key else rows.order())
        # order_by() does not undo a reverse().
        ordered.query.standard_ordering = True
        return ordered[:limit]

    def visited(self, got: Collection[Any]) -> Sequence[Any]:
        """Return the rows that a claim has visited: those up to the last one that it got."""
        if self.choice is None or len(got) < self.limit:
            return self.pks
        ours = set(got)
        return self.pks[: 1 + max(place for place, pk in enumerate(self.pks) if pk in ours)]


def spare(question: Question[Any]) -> int:
    """Return how many rows a claim may name in addition to those that it takes.

    0 unless a statement locks only the rows that it returns, however many it passes: InnoDB locks
    all rows that it reads.
    """
    able = connections[question.using].features.has_select_for_no_key_update
    if not able or len(question.model._meta.pk_fields) > 1:
        return 0
    return SPARE if question.own_table else SPARE_SPANNING


def _are_ascending(pks: Sequence[Any]) -> bool:
    # Only numbers are known to have the same order in the database.
    return all(type(pk) is int for pk in pks) and all(one < next_ for one, next_ in pairwise(pks))
