"""Stage 1: lock-free windows of primary keys.

The keys that are read here are a hint. A run scans the rows by primary key, and each window starts
after the last key of the previous one. So dead index entries are passed once. If the user has
ordered the rows, each window is read from the head of that order.

Workers that scan side by side would all try to claim the same rows. So a worker that finds a row
taken reads a larger window of the rows that are pending now, and goes on from a random place in it,
as every other worker does. From then on they rarely meet. No worker needs to know how many workers
there are.
"""

from __future__ import annotations

import random
import secrets
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Generic, TypeVar

from django.db import connections
from django.db.models import AutoField, Model, Q, QuerySet

from dcl_processor import steady as time
from dcl_processor.database.connection import reconnected
from dcl_processor.database.contention import is_contention, is_database_error

from .question import Question, is_ordered, order_of

M = TypeVar("M", bound=Model)
T = TypeVar("T")
#: The keys in their order; those left when the next window is requested were not visited.
Window = tuple[Question[M], deque[Any]]

#: Rows per window: large enough to make the read cheap, small enough to stay a fresh hint.
WINDOW = 500

#: Rows per window among other workers: large enough that workers rarely meet.
WIDE_WINDOW = 5_000

#: Seconds that a read waits for other sessions. It holds and requests no lock, but SQLite locks a
#: table against reads if threads share a database in memory, and the file in EXCLUSIVE mode.
READ_TIMEOUT = 10.0


class KeyScan(Generic[M]):
    """Yields windows by primary key, up to the highest key that existed when the scan began.

    ``tried``: keys that were tried in this scan and may still be pending. The caller adds them,
    and the scan removes those that it cannot read again.
    """

    def __init__(self, ask: Callable[[], Question[M]], tried: set[Any]) -> None:
        self._ask = ask
        self._tried = tried
        self._last: Any = None
        self.among_others = False
        self._visited = 0
        self._left: int | None = None

    def scatter(self) -> None:
        """Go on from random places: other workers are there, or the rows at the head all fail."""
        self.among_others = True

    def __iter__(self) -> Iterator[Window[M]]:
        question = self._ask()
        pks, full = _read(_keys(question), WINDOW)
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

    def _scattered(self, start: Q) -> Iterator[Window[M]]:
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

    def _read_on(self, question: Question[M], start: Q, size: int = 0) -> tuple[list[Any], bool]:
        """Read the next window, while there are visits left."""
        keys = _keys(question).filter(start, pk__lte=self._last)
        # Race: endless run. Only an increasing key shows when a row arrived, and no key shows that
        # a row came back to a window that is read again. In both cases a number of rows is a second
        # end. Counting is slow, but a short run never comes here.
        needs_number = self.among_others or not _counts_up(question.model)
        if needs_number and self._left is None and self._visited >= WIDE_WINDOW:
            self._left = retrying(keys.count, keys.db)
        return ([], False) if self._left == 0 else _read(keys, size or WINDOW)

    def _window(self, question: Question[M], pks: list[Any]) -> Iterator[Window[M]]:
        waiting = deque(pks[: self._left])
        shown = len(waiting)
        yield question, waiting
        visited = shown - len(waiting)
        self._visited += visited
        self._left = None if self._left is None else self._left - visited


def ordered_scan(ask: Callable[[], Question[M]], tried: set[Any]) -> Iterator[Window[M]]:
    """Yield windows in the queryset's own order, each read from the head again.

    ``tried``: keys that were tried and may still be pending; they stay at the head and are skipped.
    The upper end is a number, that of the rows pending after the first window, because keys are
    unrelated to an order of the user's own.
    """
    left: int | None = None
    forget_at = 2 * WINDOW
    while left != 0:
        question = ask()
        keys = keys_of(down_to_the_key(question.queryset))
        if len(tried) > forget_at:
            tried.intersection_update(still_pending(question, tried))
            # Many rows may stay pending, and are not to be looked up again for each window.
            forget_at = 2 * max(WINDOW, len(tried))
        # Skipped here and not in the query, because there may be many rows that failed. Each may
        # come many times, too, once for each match of a filter over a to-many relation.
        size = WINDOW + len(tried)
        while True:
            pks, full = _read(keys, size)
            fresh = [pk for pk in pks if pk not in tried]
            if fresh or not full:
                break
            size *= 2
        waiting = deque(fresh[:left])
        shown = len(waiting)
        yield question, waiting
        if not full:
            return
        visited = shown - len(waiting)
        left = retrying(keys.count, keys.db) if left is None else left - visited


def first_window(question: Question[M]) -> QuerySet[M, Any]:
    """Return the read of the first window, which is not executed; a run begins with it."""
    return keys_of(down_to_the_key(question.queryset))[:WINDOW]


def place_among(rows: Sequence[Any]) -> int:
    """Return a random place in a window, at which one of several workers begins."""
    return secrets.randbelow(len(rows)) if rows else 0


def count(question: Question[Any], most: int) -> int:
    """Return the number of the question's rows, without a lock; ``most`` + 1: there are more."""
    some = every(question)[: most + 1]
    return retrying(some.count, some.db)


def every(question: Question[M], rows: QuerySet[M, Any] | None = None) -> QuerySet[M, Any]:
    """Return the read of the keys of rows, by default all of the question's, each once."""
    keys = (question.queryset if rows is None else rows).order_by().values("pk")
    # A filter over a to-many relation gives a row once per match.
    return keys if question.own_table else keys.distinct()


def still_pending(question: Question[M], pks: Collection[Any]) -> list[Any]:
    """Return those of the keys that are pending now, in the order given; without a lock."""
    keys, found = list(pks), set[Any]()
    # Those that claims have missed may be some more than a window.
    for at in range(0, len(keys), 2 * WINDOW):
        some = question.among(keys[at : at + 2 * WINDOW])
        found.update(look(some.values_list("pk", flat=True)))
    return [pk for pk in keys if pk in found]


def _keys(question: Question[M]) -> QuerySet[M, Any]:
    return keys_of(down_to_the_key(question.queryset.order_by()))


def down_to_the_key(queryset: QuerySet[M, Any]) -> QuerySet[M, Any]:
    """Order the rows completely, so that the order is the same in every statement."""
    if queryset.query.extra_order_by:
        return queryset
    rows = queryset.order_by(*order_of(queryset), "pk")
    if not is_ordered(queryset):
        # order_by() does not undo a reverse(), which would reverse the scan.
        rows.query.standard_ordering = True
    return rows


def keys_of(queryset: QuerySet[M, Any], *more: str) -> QuerySet[M, Any]:
    """Return the keys of the rows, which may repeat, or tuples of a key and more."""
    keys = queryset.values_list("pk", *more, flat=not more)
    if len(keys.model._meta.pk_fields) > 1:
        # Django truncates a composite key to its first column when DISTINCT makes it select the
        # order's columns as well. DISTINCT is not needed, because callers drop repeated keys.
        keys.query.distinct = False
    return keys


def _read(keys: QuerySet[M, Any], size: int) -> tuple[list[Any], bool]:
    """Read one window; the second value is whether there may be more keys behind it."""
    rows = look(keys[:size])
    # A filter over a to-many relation returns a row once per match.
    return list(dict.fromkeys(rows)), len(rows) == size


def look(keys: QuerySet[M, Any]) -> list[Any]:
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


def highest(question: Question[M]) -> Any:
    return next(iter(look(question.table.order_by("-pk").values_list("pk", flat=True)[:1])), None)


def _counts_up(model: type[Model]) -> bool:
    field: Any = model._meta.pk
    while field.remote_field:
        field = field.target_field
    return isinstance(field, AutoField)
