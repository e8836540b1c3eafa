"""The steps of a delivery on PostgreSQL with psycopg 3: compiled statements, several in a message.

PostgreSQL executes the statements of one message one by one, each with a snapshot of its own, and
an error skips the rest of the message, a COMMIT included. Where other code looks at each statement
they are sent one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.core.exceptions import EmptyResultSet
from django.db import DataError, Error
from django.db.transaction import Atomic

from dcl_processor.core.pending import steady as time
from dcl_processor.core.pending.question import Question
from dcl_processor.core.report.exceptions import SessionLost, TransactionLost
from dcl_processor.core.report.values import Values, resolve
from dcl_processor.core.sql import isolation
from dcl_processor.core.sql.compiled import LISTED, CannotCompile, Statement, update_sql
from dcl_processor.core.sql.errors import reconnected
from dcl_processor.core.sql.session import (
    Claimed,
    Session,
    Wanted,
    Writes,
    by_key,
    compare_and_set,
    make_callbacks_robust,
    show,
)
from dcl_processor.core.sql.statements import (
    FENCE_SQL,
    XID,
    Marking,
    asked_again,
    checked_flip,
    explained,
    locked_keys,
    locked_question,
    settling,
)

BEGIN, COMMIT = Statement("BEGIN ISOLATION LEVEL READ COMMITTED"), Statement("COMMIT")

#: Seconds for which the server is asked about a transaction that it has not ended yet.
ASK_FOR = 5.0


def suits(connection: Any, question: Question[Any]) -> bool:
    """Return whether the steps can be taken on this connection, for this model."""
    client = getattr(connection.Database, "ClientCursor", None)
    driver, keys = connection.connection, question.model._meta.pk_fields
    if connection.vendor != "postgresql" or client is None or connection.in_atomic_block:
        return False
    kind = keys[0].db_type(connection) or ""
    is_plain = len(keys) == 1 and kind.startswith(LISTED) and not question.model._meta.parents
    return is_plain and driver is not None and issubclass(driver.cursor_factory, client)


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
            answers.append(driver.fetchall() if driver.pgresult.nfields else driver.rowcount)
            driver.nextset()
    return answers


class Messages(Session):
    """The steps on one connection of psycopg 3."""

    def __init__(self, using: str, label: str) -> None:
        super().__init__(using, label)
        # A handler's own durable block is refused inside it.
        self._atomic = Atomic(using, savepoint=True, durable=True)
        self._open = False
        #: The id of the last transaction with locks.
        self._xid: str | None = None
        self.answers_of_kept: list[Any] = []

    @property
    def is_open(self) -> bool:
        return self._open

    def send(self, statements: Sequence[Statement]) -> list[Any]:
        if len(statements) == 1 or is_observed(self.connection):
            return [self.execute(each.sql, each.params or None) for each in statements]
        with self.connection.cursor() as cursor:
            return send_together(cursor, statements)

    # --- a transaction with locks

    def claim(
        self, question: Question[Any], wanted: Wanted, kept: Sequence[Statement] = ()
    ) -> Claimed:
        if not kept:
            self.connection.ensure_connection()
        statements = [*kept, BEGIN, *self._claiming(question, wanted)]
        try:
            answers = self._send_behind(kept, statements)[1:]
        except BaseException:
            self._open = True
            self.rollback()
            raise
        self._xid = None
        self._enter()
        return self._claimed(question, wanted, answers)

    def _send_behind(self, kept: Sequence[Statement], statements: Sequence[Statement]) -> list[Any]:
        """Send what was kept and what comes behind it; return the answers to the latter."""
        self.connection.needs_rollback = False
        answers = self.send(statements)
        self.answers_of_kept = answers[: len(kept)]
        return answers[len(kept) :]

    def send_kept(self, statements: Sequence[Statement]) -> list[Any]:
        """Send a settlement that was kept, without a claim behind it."""
        answers = self.send(statements)
        if self._open:
            self._leave()
        return answers

    def flips(self, question: Question[Any], writes: Writes) -> list[Statement]:
        """Return the end of the open transaction, as statements: its flips, and the COMMIT."""
        return [*self._flips(question, writes), COMMIT]

    def _claiming(self, question: Question[Any], wanted: Wanted) -> list[Statement]:
        if question.own_table:
            # Race: double claim. Another worker may have finished a row since its key was read.
            # The lock and the second check are one statement.
            self._build = locked_question(question, wanted)
            return [self._build[0]]
        # Race: stale second check. The snapshot of the locking statement is older than the lock.
        # The last statement has a snapshot of its own, also in one message. It answers for rows,
        # too, that the other one could not lock.
        self._build = asked_again(question, wanted.pks)
        return [locked_keys(question, wanted.pks)[0], self._build[0]]

    def _claimed(self, question: Question[Any], wanted: Wanted, answers: list[Any]) -> Claimed:
        rows = by_key(question, self._build[1](answers[-1]), wanted.pks)
        if answers[0]:
            self._xid = answers[0][0][-1]
        if question.own_table:
            return Claimed(rows, visited(wanted, rows))
        ours = {answer[0] for answer in answers[0]}
        return Claimed({pk: row for pk, row in rows.items() if pk in ours}, wanted.pks, ours)

    def _enter(self) -> None:
        """Let Django know that a transaction is open: what a handler calls depends on it."""
        connection = self.connection
        self._open = connection.in_atomic_block = connection.commit_on_exit = True
        connection.autocommit = connection.needs_rollback = False
        connection.savepoint_ids, connection.atomic_blocks = [], [self._atomic]

    def _leave(self) -> None:
        self._open, self.connection.autocommit = False, True
        isolation.forget_transaction(self.connection)

    def begin(self) -> None:
        """Open a transaction with an id, without a claim."""
        self.connection.ensure_connection()
        self._xid = self.send([BEGIN, Statement(f"SELECT {XID}")])[1][0][0]
        self._enter()

    def check(self) -> None:
        connection = self.connection
        driver = connection.connection
        if connection.closed_in_transaction or driver is None or driver.closed:
            raise TransactionLost from SessionLost()
        if driver.pgconn.transaction_status == 0:  # libpq's PQTRANS_IDLE
            raise TransactionLost

    def leaves(self, question: Question[Any], pk: Any, writes: Sequence[Values]) -> bool:
        """Do so by one message."""
        row = question.table.filter(pk=pk)
        try:
            updates = [Statement(*update_sql(row, values)) for values in writes]
            asked = question.still_pending([pk]).values_list("pk")[:1].query.sql_with_params()
        except (CannotCompile, EmptyResultSet):
            return super().leaves(question, pk, writes)
        try:
            answers = self.send([Statement("SAVEPOINT dcl_trial"), *updates, Statement(*asked)])
        finally:
            self.send([Statement("ROLLBACK TO dcl_trial"), Statement("RELEASE dcl_trial")])
        return not answers[-1]

    def commit(self, question: Question[Any], writes: Writes) -> None:
        flips = self._flips(question, writes)
        make_callbacks_robust(self.connection)
        try:
            self.send([*flips, COMMIT])
        except DataError as error:
            raise explained(error, self.label, [pk for _, pks in writes for pk in pks]) from error
        self._leave()
        if self.connection.run_on_commit:
            self.connection.run_and_clear_commit_hooks()

    def _flips(self, question: Question[Any], writes: Writes) -> list[Statement]:
        """Return statements that write these rows, and fail unless all that exist are written."""
        some = [(values, pks) for values, pks in writes if values]
        if self._xid is None:
            return []  # nothing was claimed
        if not some:
            return [Statement(FENCE_SQL, [self._xid])]
        return [checked_flip(question, pks, resolve(values), self._xid) for values, pks in some]

    def rollback(self) -> None:
        if not self._open and not (
            isolation.in_transaction(self.connection)
            and not isolation.in_test_case(self.connection)
        ):
            return
        self._leave()
        self.connection.run_on_commit = []
        try:
            if isolation.in_transaction(self.connection):
                self.execute("ROLLBACK")
        except Error:
            self.connection.close()

    def was_committed(self) -> bool:
        if self._xid is None:
            return False
        end = time.monotonic() + ASK_FOR
        while True:
            try:
                [[status]] = self.execute("SELECT pg_xact_status(%s::xid8)", [self._xid])
            except Error:
                if not reconnected(self.using):
                    return False
                continue
            if status != "in progress" or time.monotonic() > end:
                return bool(status == "committed")
            time.sleep(0.05)

    # --- a mark that is committed before the work

    def claim_and_mark(
        self, question: Question[Any], wanted: Wanted, mark: Values, kept: Sequence[Statement] = ()
    ) -> Claimed:
        if not question.own_table:
            return super().claim_and_mark(question, wanted, mark)
        if not kept:
            self.connection.ensure_connection()
        marking = Marking(question, wanted, mark)
        [answer] = self._send_behind(kept, [*kept, marking.statement])
        before, after = marking.marks(answer)
        try:
            rows = by_key(question, marking.rows.build(answer), wanted.pks)
        except Exception:
            # The claim is committed, so rows that cannot be passed to the handler are put back.
            for pk, values in before.items():
                question.table.filter(pk=pk, **after[pk]).update(**values)
            raise
        return Claimed(rows, visited(wanted, rows), before=before, after=after)

    def mark(self, question: Question[Any], claimed: Claimed, mark: Values) -> None:
        statements, marking = [COMMIT], None
        if claimed.rows:
            marking = Marking(question, Wanted([*claimed.rows], len(claimed.rows)), mark, bare=True)
            statements = [marking.statement, COMMIT]
        try:
            answers = self.send(statements)
        except BaseException:
            self.rollback()
            raise
        self._leave()
        if marking is not None:
            claimed.before, claimed.after = marking.marks(answers[0])
            for pk, row in claimed.rows.items():
                show(row, claimed.after[pk])

    def settle(self, question: Question[Any], pk: Any, expected: Values, values: Values) -> bool:
        statement = settling(question, pk, expected, resolve(values))
        if statement is None:
            return bool(compare_and_set(question, pk, expected, values))
        [written] = self.send([statement])
        return bool(written)


def visited(wanted: Wanted, got: dict[Any, Any]) -> Sequence[Any]:
    """Return the rows that a claim has visited: those up to the last one that it got."""
    if not wanted.may_choose or len(got) < wanted.limit:
        return wanted.pks
    return wanted.pks[: 1 + max(place for place, pk in enumerate(wanted.pks) if pk in got)]
