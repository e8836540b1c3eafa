"""Stage 1 for groups: lock-free reads of the keys that have rows, and of the rows of one key.

A run walks over keys and not over rows: a key with most of the rows would fill every window, and
its rows cannot be handled at the same time anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from django.db.models import Exists, F, OuterRef, Q, QuerySet
from django.db.models.expressions import OrderBy

from dcl_processor.definition.groups import Groups, Key
from dcl_processor.exceptions import InvalidPending

from .question import Question, order_of
from .scan import WINDOW, down_to_the_key, every, keys_of, look, place_among, retrying

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
        found = look(_window(question, self._groups, narrowed, nulls_first=nulls_first))
        return found, len(found) == KEYS

    def _highest(self, question: Question[Any]) -> Any:
        last = OrderBy(F(self._groups.column), descending=True, nulls_last=True)
        return next(iter(look(_keys(question, self._groups).order_by(last)[:1])), None)


def first_window(question: Question[Any], groups: Groups) -> QuerySet[Any, Any]:
    """Return the read of the first window of keys, which is not executed; a run begins with it."""
    return _window(question, groups, Q(), nulls_first=groups.field.null)


def _window(
    question: Question[Any], groups: Groups, narrowed: Q, *, nulls_first: bool
) -> QuerySet[Any, Any]:
    first = OrderBy(F(groups.column), nulls_first=nulls_first or None)
    return _keys(question, groups).filter(narrowed).order_by(first)[:KEYS]


def _keys(question: Question[Any], groups: Groups) -> QuerySet[Any, Any]:
    keys = question.queryset.order_by()
    # order_by() does not undo a reverse(), which would reverse the walk.
    keys.query.standard_ordering = True
    # DISTINCT reads the rows of all keys before the last one: of 200,000 rows in 16 ms. A loose
    # index scan took 1 to 5 ms, but 18 s without the index, where DISTINCT took 57 ms.
    return keys.values_list(groups.column, flat=True).distinct()


def candidates(question: Question[Any], key: Key, *, most: int) -> tuple[list[Candidate], bool]:
    """Return the first rows of a key, and whether there may be more than ``most``.

    A row may match several times. In order, rows that are not due are among them.
    """
    groups = key.groups
    if not groups.in_order:
        rows = _of(question.queryset, key)
        found = look(keys_of(down_to_the_key(rows))[:most])
        return [Candidate(pk) for pk in dict.fromkeys(found)], len(found) == most
    due = question.queryset.order_by().filter(pk=OuterRef("pk"))
    rows = down_to_the_key(_of(question.unfiltered, key)).annotate(_dcl_due=Exists(due))
    found = look(keys_of(rows, "_dcl_due")[:most])
    return [Candidate(pk, is_due) for pk, is_due in dict.fromkeys(found)], len(found) == most


def head(question: Question[Any], key: Key) -> Any:
    """Return the first row of a key that is not finished, as ``first_of()`` finds it."""
    return next(iter(first_of(question, Q(**{key.groups.column: key.value}))), None)


def first_of(question: Question[Any], named: Q) -> QuerySet[Any, Any]:
    """Return the query for the first of these rows that is not finished, due or not; no lock.

    A row that the run's ``filter`` leaves out comes first, too.
    """
    return keys_of(down_to_the_key(question.unfiltered.filter(named)))[:1]


def in_flight(question: Question[Any], key: Key) -> QuerySet[Any, Any]:
    """Return the rows of a key that are claimed and not settled; none if only a lock shows them.

    Without those whose lease has lapsed: the next worker of the key takes it away.
    """
    groups = key.groups
    if groups.in_flight is None:
        return question.table.none()
    alive = groups.lease.alive() if groups.lease is not None else Q()
    return _of(question.table, key).filter(groups.in_flight, alive)


def unfinished(question: Question[Any], pks: Collection[Any]) -> set[Any]:
    """Return those of the rows that are pending, even if they are not due."""
    left, keys = set[Any](), list(pks)
    for at in range(0, len(keys), WINDOW):
        some = question.still_pending(keys[at : at + WINDOW])
        left.update(look(some.values_list("pk", flat=True)))
    return left


def count(question: Question[Any], key: Key) -> int:
    """Return the number of pending rows of a key."""
    rows = every(question, _of(question.unfiltered, key))
    return retrying(rows.count, rows.db)


def count_due(
    question: Question[Any],
    groups: Groups,
    tried: Mapping[Any, Collection[Any]],
    *,
    without: Collection[Any],
    most_keys: int,
) -> tuple[int, list[Any]]:
    """Return the number of rows of these keys that may be tried now, up to 10,000.

    ``tried``: the rows to leave out, by key; ``without``: further rows to leave out. Also returns
    the first keys with remaining rows: at least ``most_keys`` of them, if there are as many.
    """
    total, keys, column = 0, list[Any](), groups.column
    for at in range(0, len(tried), KEYS):
        values = list(tried)[at : at + KEYS]
        left_out = [*without, *(pk for value in values for pk in tried[value])][:MOST_COUNTED]
        # On the alias that is locked: a late replica would show finished rows as held.
        rows = question.queryset.filter(**{f"{column}__in": values}).exclude(pk__in=left_out)
        some = every(question, rows)[: MOST_COUNTED - total]
        number = retrying(some.count, some.db)
        if number and len(keys) < most_keys:
            have = look(rows.order_by().values_list(column, flat=True).distinct())
            keys += [value for value in values if value in have]
        total += number
        if total >= MOST_COUNTED:
            break
    return total, keys


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
