"""Stage 1: lock-free windows of primary keys.

What is read here is a hint. Rows are walked by primary key, each window starting after the last
key of the one before: dead index entries are passed once, and a sort key that changes while the
run goes on can make no row come twice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeVar

from django.db.models import Model, QuerySet

from .pending import Question

M = TypeVar("M", bound=Model)
Window = tuple[Question[M], list[Any]]

#: Rows per window. Large enough to make the read cheap, small enough to stay a fresh hint.
WINDOW = 500


def walk(ask: Callable[[], Question[M]]) -> Iterator[Window[M]]:
    """Yield windows by primary key, up to the highest key there was when the walk began."""
    question = ask()
    pks, full = _read(_keys(question))
    # Rows that arrive while the run goes on get higher keys; without an upper end a table that
    # fills as fast as it is drained would keep one run going for ever.
    last = _highest(question) if full else None
    while pks:
        yield question, _in_order(question, pks)
        if not full:
            return
        question = ask()
        pks, full = _read(_keys(question).filter(pk__gt=pks[-1], pk__lte=last))


def walk_in_order(ask: Callable[[], Question[M]], held: Collection[Any]) -> Iterator[Window[M]]:
    """Yield windows in the queryset's own order, each read from the head again.

    ``held``: keys that were tried and may still be pending; they stay at the head and are read
    past. The upper end is a number here, as many rows as were pending at the start: keys say
    nothing about an order of the user's own.
    """
    left: int | None = None
    while left is None or left > 0:
        question = ask()
        keys = _keys(question).order_by(*_ordering(question), "pk").exclude(pk__in=list(held))
        pks, full = _read(keys)
        if left is None:
            left = question.queryset.count() if full else len(pks)
        yield question, pks[:left]
        left -= len(pks) or left


def still_pending(question: Question[M], pks: Collection[Any]) -> list[Any]:
    """Return those of the keys that are pending now, in the order given; without a lock."""
    if not pks:
        return []
    found = set(question.among(pks).values_list("pk", flat=True))
    return [pk for pk in pks if pk in found]


def _keys(question: Question[M]) -> QuerySet[M, Any]:
    return question.queryset.using(question.read_using).order_by("pk").values_list("pk", flat=True)


def _read(keys: QuerySet[M, Any]) -> tuple[list[Any], bool]:
    """Read one window; the second value tells whether there may be more behind it."""
    rows = list(keys[:WINDOW])
    # A filter over a to-many relation gives a row once per match.
    return list(dict.fromkeys(rows)), len(rows) == WINDOW


def _highest(question: Question[M]) -> Any:
    table = QuerySet(question.model, using=question.read_using)
    return table.order_by("-pk").values_list("pk", flat=True).first()


def _in_order(question: Question[M], pks: list[Any]) -> list[Any]:
    """Put a window into the user's own order, which the walk by key does not follow."""
    if len(pks) < 2 or not question.queryset.ordered:
        return pks
    wanted = question.queryset.filter(pk__in=pks).using(question.read_using)
    # What is no longer pending goes to the end, where its claim finds out.
    return list(dict.fromkeys([*wanted.values_list("pk", flat=True), *pks]))


def _ordering(question: Question[M]) -> tuple[Any, ...]:
    query = question.queryset.query
    return tuple(query.order_by or query.get_meta().ordering or ())
