"""The statements of claims and settlements on a session of one's own, one at a time or together.

They are those of the package's claims with keys; the loop around them is the test's own, so that
each order of them can be had.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import psycopg
from django.db import connection
from django.db.models import Q, QuerySet

from dcl_processor.keys.claim import Claims, Mark
from dcl_processor.pending.clock import DatabaseNow
from dcl_processor.sql.compiled import Statement
from tests.models import Call

TABLE = Call._meta.db_table
COLUMNS = ("pk", "depot_id", "place", "leased_until", "claimed_at")
WAITED = Q(next_attempt_at__isnull=True) | Q(next_attempt_at__lte=DatabaseNow())
FREE = Q(leased_until__isnull=True) | Q(leased_until__lte=DatabaseNow())
LEASE = Mark(Q(leased_until__isnull=False), Q(leased_until__lte=DatabaseNow()))
CLAIM = Mark(Q(status="sending", claimed_at__isnull=False))
MARKS = {"transactional": None, "at_least_once": LEASE, "at_most_once": CLAIM}


def own_table() -> QuerySet[Call]:
    return Call.objects.filter(status="new").order_by("place")


def spanning() -> QuerySet[Call]:
    return Call.objects.filter(status="new", depot__open=True).order_by("place")


def connect() -> psycopg.Connection[Any]:
    given = connection.get_connection_params()
    for own in ("cursor_factory", "context", "prepare_threshold"):
        given.pop(own, None)
    return psycopg.connect(**given, autocommit=True, cursor_factory=psycopg.ClientCursor)


def claims_of(delivery: str, most: int = 1, *, in_order: bool = False) -> Claims:
    return Claims(Call, "depot_id", MARKS[delivery], "default", most, in_order)


@dataclass
class Worker:
    """One worker: what it wants, what it got, and its session."""

    delivery: str
    claims: Claims
    pending: Any
    lease: float
    session: psycopg.Connection[Any] = field(default_factory=connect)
    wanted: Mapping[Any, Any] = field(default_factory=dict)
    got: list[tuple[Any, ...]] = field(default_factory=list)
    committed: bool = False
    dead: bool = False

    def execute(self, statement: Statement) -> Any:
        cursor = self.session.execute(statement.sql.encode(), statement.params)
        return cursor.fetchall() if cursor.description else cursor.rowcount

    # --- the steps of a claim

    def begin(self) -> None:
        self.session.execute("BEGIN")

    def locks(self) -> None:
        self.execute(self.claims.lock_keys(self.wanted, len(self.wanted)))

    def lock_rows(self) -> None:
        self.execute(self.claims.lock_rows(self.wanted))

    def ask(self) -> list[tuple[Any, ...]]:
        self.got = self.execute(self.question())
        return self.got

    def commit(self) -> None:
        self.session.execute("COMMIT")
        self.committed = True

    def question(self) -> Statement:
        """Return the question that is asked of the locked rows; it marks those that are free."""
        due = WAITED & FREE if self.delivery == "at_least_once" else WAITED
        asked = self.pending().filter(due).filter(self.claims.condition(self.pending())).order_by()
        if self.delivery == "transactional":
            return Statement(*asked.values_list(*COLUMNS).query.get_compiler("default").as_sql())
        sql, params = asked.values_list("pk").query.get_compiler("default").as_sql()
        lease = f"clock_timestamp() + interval '{self.lease} s'"
        marks = {
            "at_least_once": f"leased_until = {lease}, attempts = attempts + 1",
            "at_most_once": "status = 'sending', claimed_at = clock_timestamp()",
        }
        columns = ", ".join(f"{TABLE}.{'id' if name == 'pk' else name}" for name in COLUMNS)
        return Statement(
            f"WITH q (pk) AS MATERIALIZED ({sql}) UPDATE {TABLE} SET {marks[self.delivery]} "
            f"FROM q WHERE {TABLE}.id = q.pk RETURNING {columns}",
            params,
        )

    # --- the end of a row

    def settle(self, row: tuple[Any, ...]) -> bool:
        """Write that a row is done, if this worker still has it."""
        where: dict[str, tuple[str, list[Any]]] = {
            "transactional": ("true", []),
            "at_least_once": ("leased_until = %s", [row[3]]),
            "at_most_once": ("claimed_at = %s", [row[4]]),
        }
        condition, params = where[self.delivery]
        written = self.execute(
            Statement(
                f"UPDATE {TABLE} SET status = 'done', leased_until = NULL, claimed_at = NULL "
                f"WHERE id = %s AND {condition}",
                [row[0], *params],
            )
        )
        return bool(written)

    def renew(self, row: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Renew a row's lease, if this worker still has it, and return the row with its lease."""
        answer = self.execute(
            Statement(
                f"UPDATE {TABLE} SET leased_until = clock_timestamp() + interval '10 s' "
                "WHERE id = %s AND leased_until = %s AND status = 'new' RETURNING leased_until",
                [row[0], row[3]],
            )
        )
        return (*row[:3], answer[0][0], row[4]) if answer else None
