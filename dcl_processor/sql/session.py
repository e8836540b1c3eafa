"""One session, and the steps that a delivery takes on it: with Django's querysets, one by one.

This path serves MariaDB, SQLite, Django's ``TestCase``, drivers behind a proxy, and the models and
keys for which ``messages`` has no statements. ``messages`` takes the same steps on PostgreSQL.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import wraps
from typing import Any

from django.db import Error, connections, transaction
from django.db.models import QuerySet

from dcl_processor.pending.question import Question, fenced_by, these
from dcl_processor.report.errors import raise_interrupt
from dcl_processor.report.exceptions import SessionLost, TransactionLost
from dcl_processor.report.outcomes import as_exception
from dcl_processor.report.values import Values, resolve
from dcl_processor.sql import isolation
from dcl_processor.sql.errors import has_news
from dcl_processor.sql.savepoint import RowSavepoint
from dcl_processor.sql.steps import (
    Claimed,
    Wanted,
    Write,
    by_key,
    not_left_pending,
    not_marked,
    not_written,
    show,
)

_FENCE = "dcl_fence"


class Session:
    """The connection of one run, and the transaction that is open on it, if one is."""

    def __init__(self, using: str, label: str) -> None:
        self.using, self.label = using, label
        self.connection: Any = connections[using]
        self._block: Any = None
        #: Whether the last transaction was committed; its callbacks may still have raised.
        self.has_committed = False
        self._is_single = False  # the last claim was for one row

    # --- a transaction with locks

    def claim(self, question: Question[Any], wanted: Wanted) -> Claimed:
        """Open a transaction, and lock the wanted rows that are still pending in it."""
        self.has_committed, self._is_single = False, wanted.limit == 1
        try:
            self.begin()
            has_locks = self.connection.features.has_select_for_update
            if not has_locks:
                lock_database(question)
            if question.claims is not None:
                return self._claim_keys(question, wanted, has_locks=has_locks)
            if not has_locks:
                return self._checked(question, wanted.pks, wanted.pks)
            if question.own_table:
                # Race: double claim. The lock and the second check are one statement, which checks
                # the locked row's newest version.
                rows = list(locking(question.among(wanted.pks)))
                return Claimed(by_key(question, rows, wanted.pks))
            # Race: stale second check. The snapshot of the locking statement is older than the
            # lock; the second statement has one of its own.
            return self._checked(question, wanted.pks, lock_rows(question, wanted.pks))
        except BaseException:
            self.rollback()
            raise

    def _claim_keys(self, question: Question[Any], wanted: Wanted, *, has_locks: bool) -> Claimed:
        """Lock the keys, lock the rows, and ask: each sees what was committed before it."""
        statements = locks_of_keys(question, wanted) if has_locks else []
        answers = [self.execute(each.sql, each.params) for each in statements]
        rows = by_key(question, [*question.keyed(wanted.pks)], wanted.pks)
        return Claimed(rows, **locked(question, wanted, answers))

    def _checked(self, question: Question[Any], pks: Sequence[Any], ours: Sequence[Any]) -> Claimed:
        rows = list(question.among(ours)) if ours else []
        return Claimed(by_key(question, rows, pks), ours)

    def begin(self) -> None:
        """Open a transaction at READ COMMITTED, with a fence that shows whether it has ended."""
        self._block = isolation.begin(self.using)
        self.execute(f"SAVEPOINT {_FENCE}")

    def execute(self, sql: str, params: Sequence[Any] | None = None) -> Any:
        with self.connection.cursor() as cursor:
            cursor.execute(sql, params)
            return cursor.fetchall() if cursor.description else cursor.rowcount

    def savepoint(self) -> RowSavepoint:
        """Return what keeps or rolls back the work of single rows in the open transaction."""
        return RowSavepoint(self.connection, sent=_FENCE if self._is_single else None)

    def check(self) -> None:
        """Raise ``TransactionLost`` if the transaction with the locks is known to have ended."""
        connection = self.connection
        if connection.closed_in_transaction or connection.connection is None:
            raise TransactionLost  # the handler has closed it
        if has_news(connection.connection):
            self._listen()
        if not getattr(connection.connection, "in_transaction", True):
            raise TransactionLost  # of SQLite, whose driver alone has this attribute

    def _listen(self) -> None:
        """Raise if the server has ended the session, of which it notifies the client."""
        try:
            self.execute("SELECT 1")
        except Error as error:
            raise SessionLost from error

    def commit(self, question: Question[Any], writes: Sequence[Write]) -> None:
        """Write the flips, and commit; nothing of the transaction is kept if that raises."""
        # Race: flip without work. If the transaction has ended, the lock and the work are lost,
        # and the next transaction would contain the flip alone.
        try:
            self.execute(f"RELEASE SAVEPOINT {_FENCE}")
        except Error as error:
            raise TransactionLost from error
        for each in writes:
            self._write(question, each)
        if self.connection.run_on_commit:
            make_callbacks_robust(self.connection)
        block, self._block = self._block, None
        block.__exit__(None, None, None)
        self.has_committed = True

    def _write(self, question: Question[Any], write: Write) -> None:
        """Write these columns and nothing else, by primary key, in the open transaction.

        Never ``save()``, which would overwrite columns that another session has changed since.
        """
        rows = question.table.filter(these(write.pks))
        number = rows.update(**resolve(write.values)) if write.values else len(write.pks)
        # A query is needed, because rows that the handler deleted have left pending, too.
        if number < len(write.pks) and rows.count() > number:
            raise not_written(self.label, write.pks)
        if write.asks:
            for pk in question.still_pending(write.pks).values_list("pk", flat=True)[:1]:
                raise not_left_pending(self.label, pk)

    def rollback(self) -> None:
        """End the transaction that is open, if one is; its callbacks never run."""
        block, self._block = self._block, None
        connection = self.connection
        if block is not None and connection.in_atomic_block:
            connection.needs_rollback = True
            with suppress(Error, transaction.TransactionManagementError):
                block.__exit__(None, None, None)
        if not isolation.in_test_case(connection) and (
            block is not None or connection.in_atomic_block
        ):
            isolation.roll_back(connection)

    def leaves(self, question: Question[Any], pk: Any, writes: Sequence[Values]) -> bool:
        """Write to a row, return whether it has left ``pending``, and roll back to before."""
        with transaction.atomic(using=self.using):
            for values in writes:
                question.table.filter(pk=pk).update(**values)
            left = not question.still_pending([pk]).exists()
            transaction.set_rollback(True, using=self.using)
        return left

    # --- a mark that is committed before the work

    def claim_and_mark(
        self, question: Question[Any], wanted: Wanted, mark: Values, *, hides: bool
    ) -> Claimed:
        """Claim the rows, write the mark to those that are still pending, and commit.

        ``hides``: the rows have to leave ``pending`` by it, and not only what is due.
        """
        claimed = self.claim(question, wanted)
        try:
            self._mark(question, claimed, mark, hides=hides)
        except BaseException:
            self.rollback()
            raise
        return claimed

    def _mark(
        self, question: Question[Any], claimed: Claimed, mark: Values, *, hides: bool
    ) -> None:
        pks = [*claimed.rows]
        if pks:
            table, names = question.table.filter(these(pks)), [*mark]
            claimed.before = _read(table, names)
            table.update(**mark)
            claimed.after = _read(table, names)
            # Race: double claim. A mark that is not kept would let another worker take the row.
            asked = question.still_pending(pks) if hides else question.among(pks)
            for pk in asked.values_list("pk", flat=True)[:1]:
                raise not_marked(self.label, pk, names)
            for pk, row in claimed.rows.items():
                show(row, claimed.after[pk])
        self.commit(question, [])

    def settle(self, question: Question[Any], write: Write) -> Collection[Any]:
        """Write to the rows that have their mark and that no other session has locked.

        Returns the keys of those; nothing is written if it raises.
        """
        try:
            self.begin()
            if not self.connection.features.has_select_for_update:
                lock_database(question)
            # Race: lost lease that writes. The rows are locked as they were found.
            mine = question.table.filter(these(write.pks), fenced_by(write.expected))
            pks = list(locking(mine.order_by()).values_list("pk", flat=True))
            self.commit(question, [Write(write.values, pks, write.asks)] if pks else [])
        except BaseException:
            self.rollback()
            raise
        return pks

    def change(
        self, question: Question[Any], write: Write, still: Callable[[Sequence[Any]], Sequence[Any]]
    ) -> tuple[Sequence[Any], Sequence[Any]]:
        """Write, in the open transaction, to the rows that no other session has locked.

        ``still``: returns those of the locked rows that are in the state in which they were seen.
        Returns their keys, and those of all rows that were locked.
        """
        free = write.pks
        if self.connection.features.has_select_for_update:
            free = lock_rows(question, write.pks)
        else:
            lock_database(question)
        # Race: double claim. A worker may have claimed or settled a row since it was seen. The
        # snapshot of the locking statement is older than the lock.
        same = still(free) if free else ()
        # What a callable returns is a value for one row.
        has_calls = any(map(callable, write.values.values()))
        for some in [[pk] for pk in same] if has_calls else [same] * bool(same):
            self._write(question, replace(write, pks=some))
        return same, free

    def was_committed(self) -> bool:
        """Return whether the last transaction was committed although an error came, if known."""
        return False


# --- the locks


def locked(question: Question[Any], wanted: Wanted, answers: Sequence[Any]) -> dict[str, Any]:
    """Return which wanted rows are locked, here and by others, by the answers of the locks."""
    if not answers:
        return {"ours": wanted.pks}
    ours, others = question.claims.locked(wanted.candidates(), answers)
    return {"ours": ours, "elsewhere": others}


def locks_of_keys(question: Question[Any], wanted: Wanted) -> list[Any]:
    """Return the statements that lock the keys of rows, and then the rows."""
    claims, candidates = question.claims, wanted.candidates()
    return [claims.lock_keys(candidates, wanted.limit), claims.lock_rows(candidates)]


def locking(rows: QuerySet[Any, Any]) -> QuerySet[Any, Any]:
    """Lock a queryset's rows, as narrowly as the database can, and pass those that are locked."""
    features = connections[rows.db].features
    if not features.has_select_for_update:
        return rows
    return rows.select_for_update(
        skip_locked=features.has_select_for_update_skip_locked,
        # The lock that an UPDATE of plain columns takes: other sessions can insert child rows.
        no_key=features.has_select_for_no_key_update,
    )


def lock_database(question: Question[Any]) -> None:
    """Take the only lock of a database without row locks."""
    # SQLite grants it at once only to a transaction that begins with a write, here an update that
    # matches no row. After a read, the later write could fail.
    connection, meta = connections[question.using], question.model._meta
    quote = connection.ops.quote_name
    table, column = quote(meta.db_table), quote(str(meta.pk_fields[0].column))
    with connection.cursor() as cursor:
        cursor.execute(f"UPDATE {table} SET {column} = {column} WHERE 1 = 0")  # noqa: S608


def lock_rows(question: Question[Any], pks: Sequence[Any]) -> list[Any]:
    """Lock the rows by their keys; return the keys of those that were locked."""
    # Race: lock on joined rows. The statement joins no table.
    columns = [each.attname for each in question.model._meta.pk_fields]
    found = {*locking(question.table.filter(these(pks)).order_by().values_list(*columns))}
    return [pk for pk in pks if (pk if isinstance(pk, tuple) else (pk,)) in found]


# --- the rows


def _read(rows: QuerySet[Any, Any], names: Sequence[str]) -> dict[Any, Values]:
    return {pk: dict(zip(names, some, strict=True)) for pk, *some in rows.values_list("pk", *names)}


def make_callbacks_robust(connection: Any) -> None:
    """Let a callback that raises be logged: the rows are settled when ``on_commit()`` runs them."""
    calls = connection.run_on_commit
    connection.run_on_commit = [(sids, _guarded(call), True) for sids, call, _ in calls]


def _guarded(call: Callable[[], Any]) -> Callable[[], Any]:
    """Let an exit in a callback be an error of it, as it is in a handler."""

    @wraps(call)
    def guarded() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001  # an exit of it is its error
            raise_interrupt(error)
            raise as_exception(error) from error.__cause__

    return guarded
