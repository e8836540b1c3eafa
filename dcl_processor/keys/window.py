"""The lock-free read of the first rows of each key: of many keys few rows each.

A loose index scan finds the keys, with one probe for each, however many rows it has. Without an
index on the key, its order and the primary key the whole table is read for each window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from django.core.exceptions import EmptyResultSet
from django.db import connections
from django.db.models import BooleanField, ExpressionWrapper, Q, QuerySet, Value
from django.db.models.expressions import RawSQL

from dcl_processor.keys.claim import Mark, in_order

#: Keys of a window, and rows that it gives in all.
KEYS, ROWS = 200, 2_000

_WINDOW = """
WITH RECURSIVE walk (key) AS (
  ({first}) UNION ALL SELECT ({then}) FROM walk WHERE walk.key IS NOT NULL
), k AS MATERIALIZED (SELECT key FROM walk WHERE key IS NOT NULL LIMIT {keys})
SELECT {last}, (SELECT key FROM k OFFSET {keys} - 1), k.key, r.* FROM k
JOIN LATERAL ({rows} LIMIT greatest({most} / (SELECT count(*) FROM k), 1)) AS r ON true"""
_BESIDE = " UNION ALL SELECT {part}, NULL, key, true, pk FROM ({rows}) AS _beside (pk, key)"

#: The parts of a window: rows to be taken over, rows without a key, and those that are read by key.
_LAPSED, _KEYLESS, _KEYED = range(3)


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

    def read(
        self, pending: QuerySet[Any], due: Q | None, after: Any, tried: Sequence[Any]
    ) -> tuple[list[Found], Any]:
        """Return the rows of the next keys, and the key after which the next window begins.

        That is ``None`` after the last key. ``pending``: all unfinished rows in their order;
        ``due``: which of them may be tried; ``tried``: those that were, in this run.
        """
        tries = pending.exclude(pk__in=[*tried]).filter(due or Q())
        if not self.in_order:
            shown: QuerySet[Any] = tries.annotate(dcl_due=Value(value=True))
        else:
            # Race: overtaking. A row that may not be tried is shown, because it holds those behind
            # it for as long as it is pending.
            is_due = Q(due or Q(), ~Q(pk__in=[*tried]))
            shown = pending.annotate(dcl_due=ExpressionWrapper(is_due, BooleanField()))
        beside = self._beside(tries, after)
        if connections[self.using].vendor == "postgresql":
            answer, last = self._probed(tries, shown, beside, after)
        elif after is None and not tries.exists():
            return [], None
        else:
            answer, last = self._listed(shown, beside, after)
        return [Found(pk, key, bool(due), part == _LAPSED) for part, key, due, pk in answer], last

    def _behind(self, rows: QuerySet[Any], after: Any) -> QuerySet[Any]:
        """Return the rows whose key comes behind another one; ``None``: that have a key."""
        if after is None:
            return rows.filter(**{f"{self.column}__isnull": False})
        return rows.filter(**{f"{self.column}__gt": after})

    def _beside(self, tries: QuerySet[Any], after: Any) -> dict[int, QuerySet[Any, Any]]:
        """Return the rows that are not read by key: those to be taken over, and without a key."""
        found = dict[int, QuerySet[Any, Any]]()
        if self.mark is not None and self.mark.lapsed is not None:
            # Race: poison row. A lapsed row keeps its key's others from being claimed, and is not
            # always among the first rows of its key.
            found[_LAPSED] = tries.filter(self.mark.in_flight).order_by("pk")[:KEYS]
        if after is None:
            found[_KEYLESS] = in_order(tries.filter(**{f"{self.column}__isnull": True}))[
                : ROWS // 2
            ]
        return {part: rows.values_list("pk", self.column) for part, rows in found.items()}

    def _probed(
        self,
        tries: QuerySet[Any],
        shown: QuerySet[Any],
        beside: Mapping[int, QuerySet[Any, Any]],
        after: Any,
    ) -> tuple[list[tuple[Any, ...]], Any]:
        """Probe for each key, and for its first rows; all in one statement."""
        keys = tries.order_by(self.column).values_list(self.column, flat=True)
        rows = in_order(shown.filter(**{self.column: RawSQL("k.key", ())}))
        parts = {
            "first": self._behind(keys, after)[:1],
            "then": self._behind(keys, RawSQL("walk.key", ()))[:1],
            "rows": rows.values_list("dcl_due", "pk"),
        }
        try:
            compiled: dict[Any, Any] = {n: self._compiled(each) for n, each in parts.items()}
        except EmptyResultSet:
            return [], None
        texts = {name: text for name, (text, _) in compiled.items()}
        sql = _WINDOW.format(keys=KEYS, most=ROWS, last=_KEYED, **texts)
        for part, each in beside.items():
            with suppress(EmptyResultSet):
                compiled[part] = self._compiled(each)
                sql += _BESIDE.format(part=part, rows=compiled[part][0])
        with connections[self.using].cursor() as cursor:
            cursor.execute(sql, [each for _, params in compiled.values() for each in params])
            answer = sorted(cursor.fetchall(), key=itemgetter(0))
        last = answer[-1][1] if answer and answer[-1][0] == _KEYED else None
        return [(part, *row) for part, _, *row in answer], last

    def _compiled(self, rows: QuerySet[Any, Any]) -> tuple[str, Sequence[Any]]:
        statement: tuple[str, Sequence[Any]] = rows.query.get_compiler(self.using).as_sql()
        return statement

    def _listed(
        self, shown: QuerySet[Any], beside: Mapping[int, QuerySet[Any, Any]], after: Any
    ) -> tuple[list[tuple[Any, ...]], Any]:
        """Read key by key where there is no LATERAL: a key with many rows fills the window."""
        order: Any = in_order(shown).query.order_by
        rows = self._behind(shown, after).order_by(self.column, *order)
        keyed = [*rows.values_list(self.column, "dcl_due", "pk")[:ROWS]]
        found = [(part, key, True, pk) for part, each in beside.items() for pk, key in each]
        found += [(_KEYED, *row) for row in keyed]
        return found, keyed[-1][0] if len(keyed) == ROWS else None
