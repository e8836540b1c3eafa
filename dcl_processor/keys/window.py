"""The lock-free read of the first rows of each key: of many keys few rows each.

A loose index scan finds the keys, with one probe for each, however many rows it has. Without an
index on the key, its order and the primary key the whole table is read for each window.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from django.db import connections
from django.db.models import BooleanField, ExpressionWrapper, F, Q, QuerySet, Value, Window
from django.db.models.expressions import RawSQL
from django.db.models.functions import RowNumber

from dcl_processor.keys.claim import in_order
from dcl_processor.keys.limits import Mark

#: Keys of a window, and rows that it gives in all.
KEYS, ROWS = 200, 2_000

#: Of rows that are held, how many are read, and how many of their keys are named.
MOST_READ, MOST_NAMED = 1_000, 10

_WINDOW = """
WITH RECURSIVE walk (key) AS (
  ({first}) UNION ALL SELECT ({then}) FROM walk WHERE walk.key IS NOT NULL
), k AS MATERIALIZED (SELECT key FROM walk WHERE key IS NOT NULL LIMIT {keys})
SELECT (SELECT key FROM k OFFSET {keys} - 1), k.key, r.* FROM k
JOIN LATERAL ({rows} LIMIT greatest({most} / (SELECT count(*) FROM k), 1)) AS r ON true"""


@dataclass(frozen=True, slots=True)
class Found:
    """A row of a window, by its primary key and its key.

    ``is_due=False``: it is first in its key's order, and may not be tried. ``is_leftover``: another
    worker had it, and did not settle it.
    """

    pk: Any
    key: Any
    is_due: bool = True
    is_leftover: bool = False


@dataclass(frozen=True, slots=True)
class Reads:
    """Reads the windows of a processor. ``column``: that of the key whose values take turns.

    ``mark``: of rows that may be taken over.
    """

    column: str
    in_order: bool
    mark: Mark | None
    using: str

    def keys_of(self, rows: QuerySet[Any]) -> list[Any]:
        """Return the first keys of rows, as their instances have them."""
        found = rows.order_by(self.column).values_list(self.column, flat=True)[:MOST_READ]
        return [*dict.fromkeys(found)][:MOST_NAMED]

    def read(
        self, pending: QuerySet[Any], due: Q | None, after: Any, tried: Sequence[Any]
    ) -> tuple[list[Found], Any]:
        """Return the rows of the next keys, and the key after which the next window begins.

        That is ``None`` after the last key. ``pending``: all unfinished rows in their order;
        ``due``: which of them may be tried; ``tried``: those that were, in this run.
        """
        tries = pending.exclude(pk__in=[*tried])
        tries = tries if due is None else tries.filter(due)
        walk = tries.filter(**{f"{self.column}__isnull": False}).order_by(self.column)
        walk = walk.values_list(self.column, flat=True)
        rest = walk if after is None else walk.filter(**{f"{self.column}__gt": after})
        shown = self._shown(pending, due, tries)
        if connections[self.using].vendor == "postgresql":
            keyed, last = self._probed(walk, rest, shown)
        else:
            keyed, last = self._numbered(rest, shown)
        found = [Found(pk, key, bool(is_due)) for key, is_due, pk in keyed]
        return [*self._first(tries, is_start=after is None), *found], last

    def _first(self, tries: QuerySet[Any], *, is_start: bool) -> Iterator[Found]:
        """Yield rows that are not read by key: those to be taken over, and those without a key."""
        if self.mark is not None and self.mark.lapsed is not None:
            # Race: poison row. A lapsed row keeps its key's others from being claimed, and is not
            # always among the first rows of its key.
            lapsed = tries.filter(self.mark.in_flight).order_by("pk")[:KEYS]
            for pk, key in lapsed.values_list("pk", self.column):
                yield Found(pk, key, is_leftover=True)
        if is_start:
            without = in_order(tries.filter(**{f"{self.column}__isnull": True}))
            for pk, key in without[: ROWS // 2].values_list("pk", self.column):
                yield Found(pk, key)

    def _shown(self, pending: QuerySet[Any], due: Q | None, tries: QuerySet[Any]) -> QuerySet[Any]:
        """Return the rows to show: in order those that are not due, too, because others wait."""
        if due is None or not self.in_order:
            shown: QuerySet[Any] = tries.annotate(dcl_due=Value(value=True))
        else:
            shown = pending.annotate(dcl_due=ExpressionWrapper(due, BooleanField()))
        return shown

    def _probed(
        self, walk: QuerySet[Any, Any], rest: QuerySet[Any, Any], shown: QuerySet[Any]
    ) -> tuple[list[tuple[Any, ...]], Any]:
        """Probe for each key, and for its first rows."""
        rows = in_order(shown.filter(**{self.column: RawSQL("k.key", ())}))
        parts = {
            "first": rest[:1],
            "then": walk.filter(**{f"{self.column}__gt": RawSQL("walk.key", ())})[:1],
            "rows": rows.values_list("dcl_due", "pk"),
        }
        compiled = {
            name: each.query.get_compiler(self.using).as_sql() for name, each in parts.items()
        }
        sql = _WINDOW.format(keys=KEYS, most=ROWS, **{n: text for n, (text, _) in compiled.items()})
        with connections[self.using].cursor() as cursor:
            cursor.execute(sql, [each for _, params in compiled.values() for each in params])
            answer = cursor.fetchall()
        return [tuple(row) for _, *row in answer], answer[0][0] if answer else None

    def _numbered(
        self, rest: QuerySet[Any, Any], shown: QuerySet[Any]
    ) -> tuple[list[tuple[Any, ...]], Any]:
        """Give the rows of each key a number, where there is no LATERAL."""
        keys = [*rest.distinct()[:KEYS]]
        order: Any = in_order(shown).query.order_by
        number = Window(RowNumber(), partition_by=[F(self.column)], order_by=[*order])
        rows = shown.filter(**{f"{self.column}__in": keys}).order_by().annotate(dcl_number=number)
        rows = rows.filter(dcl_number__lte=max(ROWS // max(len(keys), 1), 1))
        keyed = rows.order_by(self.column, "dcl_number").values_list(self.column, "dcl_due", "pk")
        return [*keyed], keys[-1] if len(keys) == KEYS else None
