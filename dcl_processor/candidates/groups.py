"""Stage 1 for groups: lock-free reads of the keys that have rows, and of the rows of one key.

A run walks over keys and not over rows: a key with most of the rows would fill every window, and
its rows cannot be handled at the same time anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from django.db.models import Exists, F, OuterRef, Q, QuerySet
from django.db.models.expressions import OrderBy

from dcl_processor.definition.groups import Groups, Key
from dcl_processor.exceptions import InvalidPending

from .question import Question, order_of
from .scan import down_to_the_key, look, place_among, retrying

#: Keys per window, and rows of one key that are read at once.
KEYS, ROWS = 200, 100


@dataclass(frozen=True, slots=True)
class Candidate:
    """A row of a key, and whether it may be tried now."""

    pk: Any
    is_due: bool = True


class KeyWalk:
    """Yields windows of keys that have rows to be tried, each from a random place in it.

    The walk ends at the highest key that existed when it began. ``has_rows_without``: whether its
    first window had rows whose key is ``NULL``.
    """

    def __init__(self, ask: Callable[[], Question[Any]], groups: Groups) -> None:
        self._ask = ask
        self._groups = groups
        self.has_rows_without = False

    def __iter__(self) -> Iterator[tuple[Question[Any], list[Key]]]:
        question, column = self._ask(), self._groups.column
        keys, full = self._read(question, Q(), nulls_first=self._groups.field.null)
        self.has_rows_without = None in keys
        keys = [key for key in keys if key is not None]
        # Race: endless run. Keys that arrive during the run may be higher than all others.
        highest = self._highest(question) if full else None
        while keys:
            place = place_among(keys)
            yield question, [Key(self._groups, key) for key in keys[place:] + keys[:place]]
            if not full:
                return
            question = self._ask()
            later = Q(**{f"{column}__gt": keys[-1], f"{column}__lte": highest})
            keys, full = self._read(question, later)

    def _read(
        self, question: Question[Any], narrowed: Q, *, nulls_first: bool = False
    ) -> tuple[list[Any], bool]:
        first = OrderBy(F(self._groups.column), nulls_first=nulls_first or None)
        found = look(self._keys(question).filter(narrowed).order_by(first)[:KEYS])
        return found, len(found) == KEYS

    def _highest(self, question: Question[Any]) -> Any:
        last = OrderBy(F(self._groups.column), descending=True, nulls_last=True)
        return next(iter(look(self._keys(question).order_by(last)[:1])), None)

    def _keys(self, question: Question[Any]) -> QuerySet[Any, Any]:
        keys = question.queryset.using(question.read_using).order_by()
        # order_by() does not undo a reverse(), which would reverse the walk.
        keys.query.standard_ordering = True
        return keys.values_list(self._groups.column, flat=True).distinct()


def candidates(
    question: Question[Any], key: Key, *, most: int | None
) -> tuple[list[Candidate], bool]:
    """Return the first rows of a key, and whether there may be more than ``most``.

    A row may match several times. In order, rows that are not due are among them.
    """
    groups = key.groups
    if not groups.in_order:
        rows = _of(question.queryset.using(question.read_using), key)
        found = look(down_to_the_key(rows).values_list("pk", flat=True)[:most])
        return [Candidate(pk) for pk in dict.fromkeys(found)], len(found) == most
    # On the alias that is locked: a replica would show the row that was handled last as the head.
    due = question.queryset.order_by().filter(pk=OuterRef("pk"))
    rows = down_to_the_key(_of(question.unfiltered, key)).annotate(_dcl_due=Exists(due))
    found = look(rows.values_list("pk", "_dcl_due")[:most])
    return [Candidate(pk, is_due) for pk, is_due in dict.fromkeys(found)], len(found) == most


def head(question: Question[Any], key: Key) -> Any:
    """Return the first row of a key that is not finished, whether it is due or not; no lock.

    Read on the alias that is locked. A row that the run's ``filter`` leaves out comes first, too.
    """
    rows = down_to_the_key(_of(question.unfiltered, key)).values_list("pk", flat=True)
    return next(iter(rows[:1]), None)


def count(question: Question[Any], key: Key) -> int:
    """Return the number of pending rows of a key."""
    rows = _of(question.unfiltered.using(question.read_using), key).order_by()
    return retrying(rows.count, rows.db)


def count_due(
    question: Question[Any], groups: Groups, values: Sequence[Any], *, without: Collection[Any]
) -> int:
    """Return the number of rows of these keys that may be tried now, up to 10,000."""
    total = 0
    for at in range(0, len(values), KEYS):
        rows = question.queryset.using(question.read_using).order_by()
        asked = rows.filter(**{f"{groups.column}__in": values[at : at + KEYS]})
        some = asked.exclude(pk__in=list(without)).values("pk")[: MOST_COUNTED - total]
        total += retrying(some.count, some.db)
        if total >= MOST_COUNTED:
            break
    return total


#: Rows up to which the held ones are counted: a backlog may have millions.
MOST_COUNTED = 10_000


def _of(queryset: QuerySet[Any, Any], key: Key) -> QuerySet[Any, Any]:
    return queryset.filter(**{key.groups.column: key.value})


def refuse_order(question: Question[Any], label: str) -> None:
    """Raise ``InvalidPending`` unless the order of the queryset is by columns of the model."""
    query = question.unfiltered.query
    columns = {"pk"}
    for field in question.model._meta.concrete_fields:
        # By its name, a relation would be in the order of its own model.
        columns |= {field.attname} if field.remote_field else {field.name, field.attname}
    wrong = [
        each
        for each in order_of(question.unfiltered)
        if not isinstance(each, str) or each.lstrip("-+") not in columns
    ]
    if wrong or query.extra_order_by:
        got = wrong[0] if wrong else "extra(order_by=…)"
        raise InvalidPending(
            f"{label}: expected pending with in_order to be ordered by columns of "
            f"{question.model._meta.label} itself, such as order_by('created_at'), got {got!r}; "
            "name a column, and a relation by its column, such as 'customer_id'."
        )
