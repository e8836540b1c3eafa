"""Lock-free windows of primary keys.

The keys are a hint. A run scans the rows by primary key, and each window starts after the last key
of the one before, so that dead index entries are passed once, and no row comes twice.

Workers that scan side by side would all try to claim the same rows. So a worker that finds a row
taken reads a larger window, and goes on from a random place in it, as every other worker does.
"""

from __future__ import annotations

import random
import secrets
from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeVar

from django.db import connections
from django.db.models import AutoField, Model, Q, QuerySet

from dcl_processor.pending import steady as time
from dcl_processor.pending.question import Question
from dcl_processor.sql.errors import is_contention, is_database_error, reconnected

T = TypeVar("T")
#: The keys in their order; those left when the next window is requested were not visited.
Window = tuple[Question[Any], deque[Any]]

#: Rows per window: large enough to make the read cheap, small enough to stay a fresh hint.
WINDOW = 500

#: Rows per window among other workers: large enough that workers rarely meet.
WIDE_WINDOW = 5_000

#: Seconds that a read waits for other sessions; only SQLite makes a read wait.
READ_TIMEOUT = 10.0


class Scan:
    """Yields windows by primary key, up to the highest key that existed when the scan began.

    ``tried``: keys that may still be pending; the caller adds them, and the scan removes those that
    it cannot read again. ``among_others``: the caller lets the scan go on from random places.
    """

    def __init__(self, ask: Callable[[], Question[Any]], tried: set[Any]) -> None:
        self._ask = ask
        self._tried = tried
        self._last: Any = None
        self.among_others = False
        self._visited = 0
        self._left: int | None = None

    def __iter__(self) -> Iterator[Window]:
        question = self._ask()
        pks, full = _read(question, _keys(question), WINDOW)
        if not pks:
            return
        # Race: endless run. Rows that arrive during the run get higher keys; without an upper end
        # a table that fills as fast as it is drained would keep one run going forever.
        end = highest(question) if full else None
        self._last = pks[-1] if end is None else end
        start = Q(pk__gte=pks[0])
        while pks:
            yield from self._window(question, pks)
            if self.among_others:
                yield from self._scattered(start)
                return
            if not full:
                return
            self._tried.clear()
            start = Q(pk__gt=pks[-1])
            question = self._ask()
            pks, full = self._read_on(question, start)

    def _scattered(self, start: Q) -> Iterator[Window]:
        while True:
            question = self._ask()
            pks, full = self._read_on(question, start, WIDE_WINDOW)
            if len(self._tried) > 2 * WIDE_WINDOW:
                self._tried.intersection_update(still_pending(question, self._tried))
            fresh = [pk for pk in pks if pk not in self._tried]
            if fresh:
                # Rows before the first fresh row are not read again.
                start = Q(pk__gte=fresh[0])
                self._tried.difference_update(pks[: pks.index(fresh[0])])
                place = secrets.randbelow(len(fresh))
                yield from self._window(question, fresh[place:])
            elif full:
                start = Q(pk__gt=pks[-1])
                self._tried.difference_update(pks)
            else:
                return

    def _read_on(self, question: Question[Any], start: Q, size: int = 0) -> tuple[list[Any], bool]:
        """Read the next window, while there are visits left."""
        keys = _keys(question).filter(start, pk__lte=self._last)
        # Race: endless run. Only an increasing key shows when a row arrived, and no key shows that
        # a row came back to a window that is read again. In both cases a number of rows is a second
        # end. Counting is slow, but a short run never comes here.
        needs_number = self.among_others or not _counts_up(question.model)
        if needs_number and self._left is None and self._visited >= WIDE_WINDOW:
            self._left = retrying(keys.count, keys.db)
        return ([], False) if self._left == 0 else _read(question, keys, size or WINDOW)

    def in_order(self) -> Iterator[Window]:
        """Yield windows in the queryset's own order, each read from the head again.

        The tried keys stay at the head, and are skipped. The upper end is a number, that of the
        rows pending after the first window, because keys are unrelated to an order of the user's.
        """
        tried, forget_at = self._tried, 2 * WINDOW
        while self._left != 0:
            question = self._ask()
            keys = _keys_of(_down_to_the_key(question.queryset))
            if len(tried) > forget_at:
                tried.intersection_update(still_pending(question, tried))
                # Many rows may stay pending, and are not to be looked up again for each window.
                forget_at = 2 * max(WINDOW, len(tried))
            fresh, full, size = list[Any](), True, WINDOW + len(tried)
            while full and not fresh:
                pks, full = _read(question, keys, size)
                fresh, size = [pk for pk in pks if pk not in tried], 2 * size
            yield from self._window(question, fresh)
            if not full:
                return
            if self._left is None:
                self._left = retrying(keys.count, keys.db)

    def _window(self, question: Question[Any], pks: list[Any]) -> Iterator[Window]:
        waiting = deque(pks[: self._left])
        shown = len(waiting)
        yield question, waiting
        visited = shown - len(waiting)
        self._visited += visited
        self._left = None if self._left is None else self._left - visited


def first_window(question: Question[Any]) -> list[Any]:
    """Return the first of the question's rows, in the user's own order."""
    return _read(question, _keys_of(_down_to_the_key(question.queryset)), WINDOW)[0]


def count(question: Question[Any], most: int, but: Collection[Any] = ()) -> int:
    """Return the number of the question's rows, without a lock; ``most`` + 1: there are more.

    ``but``: rows that are left out.
    """
    keys = question.queryset.order_by().values("pk")
    keys = keys.exclude(pk__in=[*but]) if but else keys
    # A filter over a to-many relation gives a row once per match.
    some = (keys if question.own_table else keys.distinct())[: most + 1]
    return retrying(some.count, some.db)


def still_pending(question: Question[Any], pks: Collection[Any]) -> list[Any]:
    """Return those of the keys that are pending now, in the order given; without a lock."""
    keys, found = list(pks), set[Any]()
    for at in range(0, len(keys), 2 * WINDOW):
        some = question.among(keys[at : at + 2 * WINDOW]).values_list("pk", flat=True)
        found.update(_look(some))
    return [pk for pk in keys if pk in found]


def _keys(question: Question[Any]) -> QuerySet[Any, Any]:
    keys = question.queryset.order_by("pk")
    # order_by() does not undo a reverse(), which would reverse the scan.
    keys.query.standard_ordering = True
    return _keys_of(keys)


def _down_to_the_key(queryset: QuerySet[Any, Any]) -> QuerySet[Any, Any]:
    """Order the rows completely, so that the order is the same in every statement."""
    if queryset.query.extra_order_by:
        return queryset
    # The order of the model's Meta does not count.
    return queryset.order_by(*queryset.query.order_by, "pk")


def _keys_of(queryset: QuerySet[Any, Any]) -> QuerySet[Any, Any]:
    keys = queryset.values_list("pk", flat=True)
    if len(keys.model._meta.pk_fields) > 1:
        # Django truncates a composite key to its first column when DISTINCT makes it select the
        # order's columns as well. DISTINCT is not needed, because callers drop repeated keys.
        keys.query.distinct = False
    return keys


def _read(question: Question[Any], keys: QuerySet[Any, Any], size: int) -> tuple[list[Any], bool]:
    """Read one window; the second value is whether there may be more keys behind it."""
    if question.lease is None:
        rows = _look(keys[:size])
    else:
        leased = _look(keys.values_list("pk", question.lease)[:size])
        question.leftover.update(pk for pk, lease in leased if lease is not None)
        rows = [pk for pk, _ in leased]
    # A filter over a to-many relation returns a row once per match.
    return list(dict.fromkeys(rows)), len(rows) == size


def _look(keys: QuerySet[Any, Any]) -> list[Any]:
    return retrying(lambda: list(keys.all()), keys.db)


def retrying(read: Callable[[], T], using: str) -> T:
    """Read; wait for a lock on the whole table, and reconnect if the session was ended.

    The read is a hint and holds no lock, so a lost session loses only the answer.
    """
    give_up = time.monotonic() + READ_TIMEOUT
    while True:
        try:
            return read()
        except Exception as error:
            locked = is_database_error(error) and is_contention(error)
            if locked and time.monotonic() < give_up and not connections[using].in_atomic_block:
                time.sleep(random.uniform(0.01, 0.1))  # noqa: S311  # no secret
                continue
            if not is_database_error(error) or not reconnected(using):
                raise
        return read()


def highest(question: Question[Any]) -> Any:
    table = question.table.order_by("-pk").values_list("pk", flat=True)
    return next(iter(_look(table[:1])), None)


def _counts_up(model: type[Model]) -> bool:
    field: Any = model._meta.pk
    while field.remote_field:
        field = field.target_field
    return isinstance(field, AutoField)
