"""The steps of a delivery on PostgreSQL with psycopg 3: compiled statements, several in a message.

PostgreSQL executes the statements of one message one by one, each with a snapshot of its own, and
an error skips the rest of the message, a COMMIT included. Where other code looks at each statement
they are sent one by one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from django.core.exceptions import EmptyResultSet
from django.db import Error
from django.db.transaction import Atomic

from dcl_processor.pending import steady as time
from dcl_processor.pending.question import Question
from dcl_processor.report.exceptions import SessionLost, StillPending, TransactionLost
from dcl_processor.report.values import Values
from dcl_processor.sql import isolation
from dcl_processor.sql.compiled import LISTED, CannotCompile, Statement, update_sql
from dcl_processor.sql.errors import has_news, is_back
from dcl_processor.sql.marking import Marking
from dcl_processor.sql.savepoint import NAME, RowSavepoint
from dcl_processor.sql.session import Session, locked, locks_of_keys, make_callbacks_robust
from dcl_processor.sql.statements import (
    XID,
    asked_again,
    asked_of_keys,
    fence,
    locked_question,
    locked_rows,
    meaning,
    still_asked,
    writing,
)
from dcl_processor.sql.steps import Claimed, Wanted, Write, by_key, not_marked, show

BEGIN, COMMIT = Statement("BEGIN ISOLATION LEVEL READ COMMITTED"), Statement("COMMIT")
SAVEPOINT, RELEASE = (Statement(f'{word} "{NAME}"') for word in ("SAVEPOINT", "RELEASE"))
TRY, UNDO, FORGET = (
    Statement(f"{words} dcl_trial") for words in ("SAVEPOINT", "ROLLBACK TO", "RELEASE")
)

#: Seconds for which the server is asked about a transaction that it has not ended yet.
ASK_FOR = 5.0

#: libpq's PQTRANS_IDLE and PQTRANS_INERROR.
_IDLE, _IN_ERROR = 0, 3


def suits(connection: Any, question: Question[Any]) -> bool:
    """Return whether the steps can be taken on this connection, for this model.

    The driver's connection is only read. One behind a proxy, which may be anything, is left alone.
    """
    client = getattr(connection.Database, "ClientCursor", None)
    driver, keys = connection.connection, question.model._meta.pk_fields
    if connection.vendor != "postgresql" or client is None or connection.in_atomic_block:
        return False
    is_driver = isinstance(driver, connection.Database.Connection)
    if not is_driver or type(driver) is not driver.__class__:
        return False
    kind = keys[0].db_type(connection) or ""
    is_plain = len(keys) == 1 and kind.startswith(LISTED) and not question.model._meta.parents
    # What has replaced atomic(), as a cache of queries does, has to see each transaction.
    is_own = Atomic.__enter__.__globals__["__name__"] == Atomic.__module__
    return is_plain and is_own and issubclass(driver.cursor_factory, client)


def is_observed(connection: Any) -> bool:
    """Return whether other code looks at each statement that this connection executes."""
    return bool(connection.execute_wrappers or connection.queries_logged)


def send_together(cursor: Any, statements: Sequence[Statement]) -> list[Any]:
    """Send the statements as one message; return their answers: rows, or how many were written."""
    params = [each for one in statements for each in one.params]
    cursor.execute("; ".join([each.sql for each in statements]), params)
    # The driver's own cursor: its description would describe each column again for each row.
    driver, answers = cursor.cursor, list[Any]()
    with cursor.db.wrap_database_errors:
        for _ in statements:
            try:
                answers.append(driver.fetchall() if driver.pgresult.nfields else driver.rowcount)
            except Exception as error:
                error.answer = driver.pgresult  # type: ignore[attr-defined]
                raise
            driver.nextset()
    return answers


class Messages(Session):
    """The steps on one connection of psycopg 3."""

    def __init__(self, using: str, label: str) -> None:
        super().__init__(using, label)
        # A handler's own durable block is refused inside it.
        self._atomic = Atomic(using, savepoint=True, durable=True)
        #: The id of the last transaction with locks.
        self._xid: str | None = None

    def send(self, statements: Sequence[Statement]) -> list[Any]:
        if len(statements) > 1 and is_observed(self.connection):
            return [self.send([each])[0] for each in statements]
        with self.connection.cursor() as cursor:
            return send_together(cursor, statements)

    def _send_checked(self, statements: Sequence[Statement], pks: Sequence[Any]) -> list[Any]:
        """Send statements that write to these rows; say what an error of them means."""
        try:
            return self.send(statements)
        except Error as error:
            meant = meaning(error, self.label, pks)
            if meant is None:
                raise
            raise meant from error

    # --- a transaction with locks

    def claim(self, question: Question[Any], wanted: Wanted) -> Claimed:
        self.connection.ensure_connection()
        claiming = self._claiming(question, wanted)
        self._is_single, self.has_committed = wanted.limit == 1, False
        try:
            answers = self.send([BEGIN, *claiming, *[SAVEPOINT] * self._is_single])
        except BaseException:
            self.rollback()
            raise
        self._xid = None
        self._enter()
        return self._claimed(question, wanted, answers[1 : 1 + len(claiming)])

    def _claiming(self, question: Question[Any], wanted: Wanted) -> list[Statement]:
        if question.claims is not None:
            self._build = asked_of_keys(question)
            return [*locks_of_keys(question, wanted), self._build[0]]
        if question.own_table:
            # Race: double claim. Another worker may have finished a row since its key was read.
            # The lock and the second check are one statement.
            self._build = locked_question(question, wanted)
            return [self._build[0]]
        # Race: stale second check. The snapshot of the locking statement is older than the lock.
        # The last statement has a snapshot of its own, also in one message. It answers for rows,
        # too, that the other one could not lock.
        self._build = asked_again(question, wanted.pks)
        return [locked_rows(question, wanted.pks)[0], self._build[0]]

    def _claimed(self, question: Question[Any], wanted: Wanted, answers: list[Any]) -> Claimed:
        rows = by_key(question, self._build[1](answers[-1]), wanted.pks)
        locking = answers[-2:][0]  # the only answer, or the one before the last
        if locking:
            self._xid = locking[0][-1]
        if question.claims is not None:
            return Claimed(rows, **locked(question, wanted, answers[:-1]))
        if question.own_table:
            return Claimed(rows)
        ours = {answer[0] for answer in answers[0]}
        return Claimed({pk: row for pk, row in rows.items() if pk in ours}, ours)

    def _enter(self) -> None:
        """Let Django know that a transaction is open: what a handler calls depends on it."""
        connection = self.connection
        connection.in_atomic_block = connection.commit_on_exit = True
        connection.autocommit = connection.needs_rollback = False
        connection.savepoint_ids, connection.atomic_blocks = [], [self._atomic]

    def _leave(self) -> None:
        connection = self.connection
        connection.in_atomic_block = connection.needs_rollback = False
        connection.autocommit = True
        connection.savepoint_ids, connection.atomic_blocks = [], []

    def begin(self) -> None:
        """Open a transaction with an id, without a claim."""
        self.connection.ensure_connection()
        self._xid, self._is_single = self.send([BEGIN, Statement(f"SELECT {XID}")])[1][0][0], False
        self._enter()

    def savepoint(self) -> RowSavepoint:
        return RowSavepoint(self.connection, sent=NAME if self._is_single else None)

    def check(self) -> None:
        connection = self.connection
        driver = connection.connection
        if connection.closed_in_transaction or driver is None:
            raise TransactionLost  # the handler has closed it
        if driver.closed:
            raise SessionLost
        if driver.pgconn.transaction_status == _IDLE:
            raise TransactionLost
        if has_news(driver):
            self._listen()

    def leaves(self, question: Question[Any], pk: Any, writes: Sequence[Values]) -> bool:
        row = question.table.filter(pk=pk)
        try:
            updates = [Statement(*update_sql(row, values)) for values in writes]
            asked = question.still_pending([pk]).values_list("pk")[:1].query.sql_with_params()
        except (CannotCompile, EmptyResultSet):
            return super().leaves(question, pk, writes)
        try:
            answers = self.send([TRY, *updates, Statement(*asked), UNDO, FORGET])
        except BaseException:
            if self.connection.connection.pgconn.transaction_status == _IN_ERROR:
                self.send([UNDO, FORGET])
            raise
        return not answers[-3]

    def commit(self, question: Question[Any], writes: Sequence[Write]) -> None:
        statements = [RELEASE] * self._is_single
        pks = [pk for each in writes for pk in each.pks]
        if self._xid is not None:
            statements += self._written(question, writes, self._xid)
        has_callbacks = bool(self.connection.run_on_commit)
        if has_callbacks:
            make_callbacks_robust(self.connection)
        self._send_checked([*statements, COMMIT], pks)
        self._leave()
        self.has_committed = True
        if has_callbacks:
            self.connection.run_and_clear_commit_hooks()

    def _written(
        self, question: Question[Any], writes: Sequence[Write], xid: str
    ) -> list[Statement]:
        """Return statements that write these rows, and fail unless all that exist are written."""
        statements = [writing(question, w, xid) for w in writes if w.values] or [fence(xid)]
        asking = [w for w in writes if w.asks and not (w.values and question.asks_own_row)]
        return [*statements, *(still_asked(question, each.pks) for each in asking)]

    def rollback(self) -> None:
        connection = self.connection
        if connection.connection is None or connection.closed_in_transaction:
            super().rollback()
            return
        is_open = isolation.in_transaction(connection)
        if not (is_open or connection.in_atomic_block):
            return
        self._leave()
        connection.run_on_commit = []
        try:
            if is_open:
                self.execute("ROLLBACK")
        except Error:
            connection.close()

    def was_committed(self) -> bool:
        if self._xid is None:
            return False
        end = time.monotonic() + ASK_FOR
        while is_back(self.using, end - time.monotonic()):
            try:
                [[status]] = self.execute("SELECT pg_xact_status(%s::xid8)", [self._xid])
            except Error:
                status = "in progress"  # as far as this connection knows
            if status != "in progress" or time.monotonic() > end:
                return bool(status == "committed")
            time.sleep(0.05)
        return False

    # --- a mark that is committed before the work

    def claim_and_mark(
        self, question: Question[Any], wanted: Wanted, mark: Values, *, hides: bool
    ) -> Claimed:
        if not question.own_table or (hides and not question.asks_own_row):
            return super().claim_and_mark(question, wanted, mark, hides=hides)
        self.connection.ensure_connection()
        marking = Marking(question, wanted, mark, hides=hides)
        locks = [] if question.claims is None else [BEGIN, *locks_of_keys(question, wanted)]
        sent = [*locks, marking.statement, *[COMMIT] * bool(locks)]
        try:
            answers = self._send_mark(sent, wanted.pks, mark)
        except Exception as error:
            # The claim is committed, so rows that the driver cannot read are put back, too.
            for each in marking.undoing(getattr(error.__cause__ or error, "answer", None)):
                self.execute(each.sql, each.params)
            raise
        rows, before, after = marking.taken(question, answers[len(locks)], wanted.pks)
        known = locked(question, wanted, answers[1 : len(locks)])
        return Claimed(rows, before=before, after=after, **known)

    def _mark(
        self, question: Question[Any], claimed: Claimed, mark: Values, *, hides: bool
    ) -> None:
        if not claimed.rows:
            self.rollback()
            return
        pks = [*claimed.rows]
        marking = Marking(question, Wanted(pks, len(pks)), mark, hides=hides, bare=True)
        # Race: double claim. A mark that is not kept would let another worker take the row.
        asked = still_asked(question, pks, due=not hides)
        answers = self._send_mark([marking.statement, asked, COMMIT], pks, mark)
        self._leave()
        claimed.before, claimed.after = marking.marks(answers[0])
        for pk, row in claimed.rows.items():
            show(row, claimed.after[pk])

    def _send_mark(
        self, statements: Sequence[Statement], pks: Sequence[Any], mark: Values
    ) -> list[Any]:
        try:
            return self._send_checked(statements, pks)
        except BaseException as error:
            self.rollback()
            if isinstance(error, StillPending):
                raise not_marked(self.label, error.pk, [*mark]) from error
            raise

    def settle(self, question: Question[Any], write: Write) -> Collection[Any]:
        self.connection.ensure_connection()
        asks_more = write.asks and not question.asks_own_row
        statements = [*[BEGIN] * asks_more, writing(question, write, None)]
        try:
            written = {str(key) for key, _ in self._send_checked(statements, write.pks)[-1]}
            pks = [pk for pk in write.pks if str(pk) in written]
            if asks_more:
                # Rows that were not written, because they are locked or lost, are still pending.
                asked = [still_asked(question, pks)] if pks else []
                self._send_checked([*asked, COMMIT], pks)
        except BaseException:
            self.rollback()
            raise
        return pks
