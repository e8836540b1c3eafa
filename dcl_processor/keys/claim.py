"""The claim of rows that have keys: one message of three statements behind its BEGIN.

1. ``lock_keys()``: try the advisory lock of each key. Nothing waits.
2. ``lock_rows()``: lock the rows of the keys that were got, if they still have these keys.
3. The question, with ``condition()``.

Each statement sees what was committed before it began, because the session is at READ COMMITTED.
What 1 and 2 got is a setting of the transaction, which the next statement reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from hashlib import blake2b
from operator import add
from typing import Any

from django.db import connections
from django.db.models import (
    BooleanField,
    F,
    Func,
    IntegerField,
    Model,
    OuterRef,
    Q,
    QuerySet,
    Subquery,
)
from django.db.models.lookups import LessThan

from dcl_processor.pending.question import these
from dcl_processor.sql.compiled import Statement

#: How many advisory locks a key has: one for each row of it that may be in flight.
PLACES = 4_096

_LOCKS = """
SELECT set_config('dcl.keys', places::text, true), places FROM (
  SELECT coalesce(array_agg(place), '{}') AS places FROM (
    SELECT place FROM unnest(%s::bigint[]) WITH ORDINALITY AS _keys (first, place)
    WHERE (SELECT true FROM generate_series(first, first + %s) AS n
           WHERE pg_try_advisory_xact_lock(n) LIMIT 1) LIMIT %s) AS _got) AS _listed"""
_WAIT = """
SELECT set_config('dcl.keys', '{1}', true), '{1}'::int[]
FROM pg_advisory_xact_lock((%s::bigint[])[1])"""
_LOCK_ROWS = """
SELECT set_config('dcl.rows', pks::text, true), pks, pg_current_xact_id() FROM (
  SELECT coalesce(array_agg(pk), '{{}}') AS pks FROM (
    SELECT t.{pk} AS pk FROM {table} AS t
    JOIN unnest(%s::{type}[], %s::int[]{keys}) AS w (pk, place{key}) ON t.{pk} = w.pk
    WHERE (w.place = 0 OR w.place = ANY(current_setting('dcl.keys')::int[])){same}
    FOR NO KEY UPDATE OF t SKIP LOCKED) AS _locked) AS _listed"""


class _Number(Subquery):
    """How many rows there are: evaluated for each row of the question, never joined."""

    template = "(SELECT count(*) FROM (%(subquery)s) AS _counted)"
    output_field = IntegerField()  # pyright: ignore[reportAssignmentType]  # as Django does


class _Locked(Func):
    """Whether the second statement has locked the row."""

    arity = 1
    output_field = BooleanField()  # pyright: ignore[reportAssignmentType]  # as Django does
    template = "%(expressions)s = ANY(current_setting('dcl.rows')::%(type)s[])"


@dataclass(frozen=True, slots=True)
class Mark:
    """How a row in flight is recognised; ``lapsed``: those that another worker may take over."""

    in_flight: Q
    lapsed: Q | None = None


@dataclass(frozen=True)
class Claims:
    """The claims of a processor whose rows share keys, or the places of all workers together.

    ``column``: that of the key; ``None``: all rows have one. ``mark``: ``None`` if the locks of a
    claim are held until its rows are settled. ``most``: rows of one key in flight. Candidates are
    given by their primary keys, each with the key that it had when it was read.
    """

    model: type[Model]
    column: str | None
    mark: Mark | None
    using: str
    most: int = 1
    in_order: bool = False
    label: str = ""

    # --- the locks

    @cached_property
    def has_locks(self) -> bool:
        """Whether the database has advisory locks; SQLite has one lock for everything."""
        return connections[self.using].vendor == "postgresql"

    def lock_keys(self, candidates: Mapping[Any, Any], room: int) -> Statement:
        """Return what tries the locks of the candidates' keys; ``room``: the most rows to claim."""
        table = self.model._meta.db_table
        keys = [lock_number(table, self.column or "", key) for key in self._keys(candidates)]
        if self.column is None and self.mark is not None:
            # Race: worker over the cap. With marks the lock is held shortly, and waited for: a
            # session that waits here holds nothing that another one wants.
            return Statement(_WAIT, [keys])
        # Race: two of one key. The rows of a transaction are one place of their key. A scan of a
        # function stops at the first lock; a table's scan would lock others, too.
        return Statement(_LOCKS, [keys, 0 if self.mark else self.most - 1, room])

    def lock_rows(self, candidates: Mapping[Any, Any]) -> Statement:
        """Return what locks the candidates whose keys were got, and that still have them."""
        places = [*self._places(candidates).values()]
        keys = [] if self.column is None else [[*candidates.values()]]
        return Statement(self._lock_rows, [[*candidates], places, *keys])

    def locked(
        self, candidates: Mapping[Any, Any], answers: Sequence[Any]
    ) -> tuple[set[Any], set[Any]]:
        """Return the candidates that are locked, and those that other sessions have locked.

        ``answers``: those of ``lock_keys()`` and ``lock_rows()``.
        """
        got, ours = ({*answer[0][1]} for answer in answers)
        free = {pk for pk, place in self._places(candidates).items() if place in {0, *got}}
        return ours, free - ours

    @cached_property
    def _lock_rows(self) -> str:
        meta, quote = self.model._meta, connections[self.using].ops.quote_name
        keys = key = same = ""
        if self.column is not None:
            # Race: two of one key. A row that has moved to another key is not locked for the old
            # one.
            field: Any = meta.get_field(self.column)
            keys, key = f", %s::{self._type(self.column)}[]", ", key"
            same = f" AND t.{quote(field.column)} IS NOT DISTINCT FROM w.key"
        return _LOCK_ROWS.format(
            pk=quote(str(meta.pk_fields[0].column)),
            table=quote(meta.db_table),
            type=self._type("pk"),
            keys=keys,
            key=key,
            same=same,
        )

    def _type(self, column: str) -> str:
        field: Any = self.model._meta.pk if column == "pk" else self.model._meta.get_field(column)
        return str(field.rel_db_type(connections[self.using]))

    def _keys(self, candidates: Mapping[Any, Any]) -> list[Any]:
        if self.column is None:
            return [self.label]
        return [key for key in dict.fromkeys(candidates.values()) if key is not None]

    def _places(self, candidates: Mapping[Any, Any]) -> dict[Any, int]:
        """Return the number of each candidate's key, from 1; 0: it has none, and so no limit."""
        if self.column is None:
            return dict.fromkeys(candidates, 1)
        numbers = {key: number for number, key in enumerate(self._keys(candidates), 1)}
        return {pk: numbers.get(key, 0) for pk, key in candidates.items()}

    # --- the question

    def condition(self, pending: QuerySet[Any], pks: Sequence[Any] = ()) -> Q:
        """Return what is asked of a locked row's key.

        ``pending``: all unfinished rows in their order, whether they are due or not. ``pks``: the
        rows that are locked, where no statement has noted them.
        """
        ours = Q(_Locked(F("pk"), type=self._type("pk"))) if self.has_locks else these(pks)
        free = self._free(pending, ours)
        if self.mark is not None and self.mark.lapsed is not None:
            # A row with a lapsed lease had its place once: a takeover adds none. Without this it
            # and an earlier row that came meanwhile would wait for each other.
            free = self.mark.in_flight | free
        return ours & free

    def _free(self, pending: QuerySet[Any], ours: Q) -> Q:
        column = self.column
        same = Q(**{column: OuterRef(column)}) if column else Q()
        free = self._has_place(pending.filter(same), same, ours)
        if self.in_order:
            # Race: overtaking. Not "none comes before it", which an order with NULL cannot say.
            head = in_order(pending.filter(same)).values("pk")[:1]
            free &= Q(**{f"{column}__isnull": True}) | Q(pk=Subquery(head))
        return free

    def _has_place(self, siblings: QuerySet[Any], same: Q, ours: Q) -> Q:
        if self.mark is None:
            return Q()  # the lock of the key says so
        table = QuerySet[Any](self.model, using=self.using).filter(same)
        others, in_flight, lapsed = ~Q(pk=OuterRef("pk")), self.mark.in_flight, self.mark.lapsed
        if lapsed is None:
            blocking = [table.filter(in_flight & others)]
        else:
            # A lapsed row holds its place until it is taken over itself, which no renewal
            # survives; but not one that was taken out of pending.
            blocking = [table.filter(in_flight & others & ~lapsed)]
            blocking += [siblings.filter(in_flight & others & lapsed)]
        # Rows of the same claim, as far as they come first.
        blocking += [table.filter(ours, ~in_flight, pk__lt=OuterRef("pk"))]
        few: list[Any] = [_Number(rows.order_by().values("pk")[: self.most]) for rows in blocking]
        return Q(LessThan(reduce(add, few), self.most))


def lock_number(table: str, column: str, value: Any) -> int:
    """Return the first lock of a key; the ``PLACES`` numbers from there are its own.

    Two keys with the same number exclude each other: that costs time, and breaks no limit.
    """
    words = ("dcl_processor", table, column, str(value))
    digest = blake2b("\0".join(words).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True) & -PLACES


def in_order(rows: QuerySet[Any]) -> QuerySet[Any]:
    """Order rows as the user does, and rows that are equal in that by their primary key."""
    return rows.order_by(*(rows.query.order_by or ()), "pk")
