"""Empties the tables between tests, by a session that is kept."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from django.db import Error, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from tests.waiting import PATIENCE

#: What migrations put into the test database, the same for every test.
KEPT = {"django_content_type", "auth_permission"}
#: How PostgreSQL lists the session.
NAME = "cleaner"
#: Seconds that it waits for the locks of a session that a test has left open.
LOCKED = int(PATIENCE)


class Cleaner:
    """Empties the tables of one test database.

    A session of its own, which has looked up each table once. Django ends its sessions after each
    test, so the first statement of the next one would look them all up again.
    """

    def __init__(self, alias: str) -> None:
        self._alias = alias
        self._session: BaseDatabaseWrapper | None = None
        self._statements: list[str] = []

    def empty(self) -> None:
        """Delete every row that a test may have left."""
        try:
            self._execute()
        except Error:
            # The test has ended every session, or has made and dropped tables.
            self.close()
            self._execute()

    def close(self) -> None:
        """End the session, which would keep the database from being dropped."""
        if self._session is not None:
            with suppress(Error):
                self._session.close()
            self._session = None

    def _execute(self) -> None:
        if self._session is None:
            self._session, self._statements = self._connected()
        with self._session.cursor() as cursor:
            for statement in self._statements:
                cursor.execute(statement)
                # MySQL's drivers keep the answer of each statement of a message to be read.
                while self._session.vendor == "mysql" and cursor.nextset():
                    pass

    def _connected(self) -> tuple[BaseDatabaseWrapper, list[str]]:
        own = connections[self._alias]
        # SQLite has one writer at a time, and no session on a server.
        session: Any = own if own.vendor == "sqlite" else own.copy()
        emptied = [
            session.ops.quote_name(table)
            for table in session.introspection.django_table_names(
                only_existing=True, include_views=False
            )
            if table not in KEPT
        ]
        deletes = [f"DELETE FROM {table}" for table in emptied]  # noqa: S608  # quoted
        match session.vendor:
            case "postgresql":
                known = [f"SET application_name = '{NAME}'", f"SET lock_timeout = '{LOCKED}s'"]
                return session, ["; ".join([*known, *deletes])]
            case "mysql":
                patience = f"SET innodb_lock_wait_timeout = {LOCKED}, foreign_key_checks = 0"
                return session, ["; ".join([patience, *deletes])]
            case _:
                return session, ["PRAGMA foreign_keys = OFF", "BEGIN", *deletes, "COMMIT"]
