"""Lock rows, and check them again under their locks: what prevents a double claim is here.

The result is what the user's queryset gives for these rows. What the engine has to know of a row
stands beside it, in ``Held``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from django.core.exceptions import EmptyResultSet
from django.db import connections
from django.db.models import Q, QuerySet

from dcl_processor.candidates.question import KeyList, Question, RowFilter
from dcl_processor.compiled_sql.claims import CompiledSelect, RowBuilder
from dcl_processor.compiled_sql.update import look_sql
from dcl_processor.database.connection import has_id
from dcl_processor.exceptions import InvalidPending
from dcl_processor.locking.isolation import refuse_without_transactions
from dcl_processor.locking.row_locks import database_lock, keys_in

from .session import Session
from .settlement import Answer, Claimed, Held, Missed, Statement, Wanted

#: Returns the queryset for rows that are named by their keys.
Ask = Callable[[RowFilter], QuerySet[Any, Any]]

#: Sends the first statements of a claim, in the transaction that it is in.
Send = Callable[[Sequence[Statement]], Sequence[Answer]]

#: In the place of a question that no row can meet, for which Django has no statement.
_NOTHING = Statement("SELECT 1 FROM (SELECT 1 AS one) AS dcl_nothing WHERE 1 = 0")

_TRANSACTION_ID = "pg_current_xact_id()"


@dataclass(frozen=True, slots=True)
class Read:
    """A statement that reads rows, and what makes the rows from its answer."""

    statement: Statement
    build: Callable[[Answer], list[Any]]


def claim(
    session: Session, question: Question[Any], wanted: Wanted, send: Send | None = None
) -> Claimed:
    """Open a transaction, and lock the wanted rows that are still pending in it.

    If it may choose, the result does not mention the rows behind the last one that was taken. Never
    waits for a lock, if the database supports that. Raises ``InvalidPending`` if the
    question has several answers for one row, and ``Unsupported`` if a table has no transactions.
    """
    send = send or session.begin
    connection = session.connection
    if connection.vendor == "mysql":
        refuse_without_transactions(question)
    if not connection.features.has_select_for_update:
        return _claim_database(send, session, question, wanted)
    if not question.own_table:
        return _claim_spanning(send, session, question, wanted)
    # Race: double claim. Another worker may have finished a row since its key was read. The lock
    # and the second check are one statement, which checks the locked row's newest version.
    read = _own(question, wanted)
    [answer] = send([read.statement])
    rows = _by_key(question, read.build(answer))
    pks = wanted.pks if wanted.choice is None else wanted.visited(rows)
    return _claimed(session, pks, rows, (), (answer, read.statement))


def _claim_spanning(
    send: Send, session: Session, question: Question[Any], wanted: Wanted
) -> Claimed:
    pks, lock = wanted.pks, _lock(question, wanted)
    ask = _asking(question, pks)
    # Race: stale second check. The snapshot of the locking statement is older than the lock, and
    # joined rows would be read from it. The last statement has a snapshot of its own, also in one
    # message. It answers for rows, too, that the others could not lock.
    if wanted.choice is None and (session.is_open or session.combines):
        locked, answer = send([lock.statement, ask.statement])
        ours = keys_in(question.model, lock.build(locked))
        rows = ask.build(answer)
    else:
        [locked] = send([lock.statement])
        ours = keys_in(question.model, lock.build(locked))
        some = [pk for pk in pks if pk in ours]
        ask = _asking(question, some or pks)
        rows = ask.build(session.execute(ask.statement)) if some else []
    found = {pk: row for pk, row in _by_key(question, rows).items() if pk in ours}
    visited = pks if wanted.choice is None else wanted.visited(ours)
    return _claimed(session, visited, found, ours, (locked, lock.statement))


def _claim_database(
    send: Send, session: Session, question: Question[Any], wanted: Wanted
) -> Claimed:
    # Race: double claim. Another worker may have finished a row before this lock was taken.
    ask = _asking(question, wanted.pks)
    _, answer = send([Statement(database_lock(question)), ask.statement])
    found = _by_key(question, ask.build(answer))
    return _claimed(session, wanted.pks, found, wanted.pks, (answer, ask.statement))


def _claimed(
    session: Session,
    pks: Sequence[Any],
    found: Mapping[Any, Any],
    locked: Collection[Any],
    read: tuple[Answer, Statement],
) -> Claimed:
    """Return what was claimed; ``read``: what returned the transaction's id, if that has one."""
    answer, statement = read
    held = [Held(pk, found[pk]) for pk in pks if pk in found]
    missed = [] if len(held) == len(pks) else [pk for pk in pks if pk not in found]
    return Claimed(
        held,
        {pk: Missed.STALE if pk in locked else Missed.ABSENT for pk in missed},
        transaction_id=answer[0][-1] if answer and _TRANSACTION_ID in statement.sql else None,
        driver=session.connection.connection,
    )


# --- the statements


def statements(question: Question[Any], wanted: Wanted) -> list[Statement]:
    """Return the statements that ``claim()`` would send if it could lock all the rows.

    Compiles them, and locks nothing.
    """
    connection = connections[question.using]
    again = _asking(question, wanted.pks).statement
    if not connection.features.has_select_for_update:
        return [Statement(database_lock(question)), again]
    if question.own_table:
        return [_own(question, wanted).statement]
    return [_lock(question, wanted).statement, again]


def _own(question: Question[Any], wanted: Wanted) -> Read:
    """Return the read that locks the rows and checks them."""

    def asked(rows: RowFilter) -> QuerySet[Any, Any]:
        return wanted.first(question.narrowed(rows), rows)

    locking = partial(_locking, question.queryset)
    return read_of(question, ("claim", wanted.choice), wanted.pks, asked, locking)


def read_of(
    question: Question[Any],
    name: tuple[Any, Any],
    pks: Sequence[Any],
    ask: Ask,
    change: Callable[[str], str] = str,
    *,
    column: str | None = None,
) -> Read:
    """Return the read of rows by their keys, which is compiled once per window if possible.

    ``change``: changes the statement. ``column``: the ``pks`` are values of this column instead.
    """
    if not pks:
        return Read(_NOTHING, lambda _: [])
    many = len(pks) > 1
    make = partial(
        CompiledSelect[Any], question.model, question.using, ask, change, many=many, column=column
    )
    select: CompiledSelect[Any] | None = question.statements.get((name, many), make)
    if select is not None:
        return Read(Statement(select.sql, select.params(pks)), select.build)
    try:
        named = KeyList(pks, column or "pk")
        rows: RowBuilder[Any] = RowBuilder(ask(named), question.using)
    except EmptyResultSet:
        return Read(_NOTHING, lambda _: [])
    return Read(Statement(change(rows.sql), rows.params), rows.build)


def _locking(queryset: QuerySet[Any, Any], sql: str) -> str:
    """Let a statement lock its rows, and return the id of its transaction behind its columns.

    The lock is the narrowest that the database has, with the option that waits least. It is not
    Django's ``select_for_update()``, which has to be compiled inside a transaction; and the id is
    no annotation, which would be an attribute of the user's instances.
    """
    connection, query = connections[queryset.db], queryset.query
    own = connection.ops.quote_name(query.base_table or query.get_meta().db_table)
    if has_id(connection):
        sql = sql.replace(f" FROM {own}", f", {_TRANSACTION_ID} FROM {own}", 1)
    return f"{sql} {lock_clause(connection, query, own)}"


def lock_clause(connection: Any, query: Any, own: str) -> str:
    """Return the clause that locks the rows of the table ``own`` alone."""
    features = connection.features
    skip_locked = features.has_select_for_update_skip_locked
    # With one table OF is left out, because PostgreSQL accepts no schema-qualified name in it.
    several = sum(map(bool, query.alias_refcount.values())) > 1
    joins = several or query.extra_tables or query.select_related
    clause: str = connection.ops.for_update_sql(
        skip_locked=skip_locked,
        nowait=not skip_locked and features.has_select_for_update_nowait,
        # In case a statement joins a table after all: its rows stay free for other sessions.
        of=(own,) if joins and features.has_select_for_update_of else (),
        # The lock that an UPDATE of plain columns takes: other sessions can insert child rows.
        no_key=features.has_select_for_no_key_update,
    )
    return clause


def _asking(question: Question[Any], pks: Sequence[Any]) -> Read:
    """Return the read that asks the question again for rows that are locked."""
    ask = partial(_asked, question, many=len(pks) > 1)
    return read_of(question, ("ask", None), pks, ask)


def look(question: Question[Any], pks: Sequence[Any]) -> Statement:
    """Return a statement that fails if one of the rows is still pending, due or not."""

    def asked(rows: RowFilter) -> QuerySet[Any, Any]:
        return question.unfiltered.filter(rows.condition).order_by().values_list("pk")

    return read_of(question, ("look", None), pks, asked, look_sql).statement


def _asked(question: Question[Any], rows: RowFilter, *, many: bool) -> QuerySet[Any, Any]:
    # A to-many join returns a row once per match, and only its annotations can differ.
    return question.narrowed(rows)[: None if many or _added(question) else 1]


def _lock(question: Question[Any], wanted: Wanted) -> Read:
    """Return the read of the rows' keys, for their lock."""

    # Race: lock on joined rows. This statement joins no table: it has the row's keys alone, not the
    # question, and no order, because the model's own may join rows that would be locked.
    # With a choice, the question is added as a hint, like the read before it, and not as the check:
    # it avoids useless locks of rows that were finished before this statement.
    def keys(named: RowFilter) -> QuerySet[Any, Any]:
        asked = named.condition
        if wanted.choice is not None:
            asked = Q(pk__in=question.narrowed(named).values("pk"))
        # By column, because Django cannot resolve OF for a composite key as a whole.
        columns = [field.attname for field in question.model._meta.pk_fields]
        return wanted.first(question.table.filter(asked).order_by().values_list(*columns), named)

    locking = partial(_locking, question.table)
    return read_of(question, ("lock", wanted.choice), wanted.pks, keys, locking)


# --- the rows


def _by_key(question: Question[Any], rows: Iterable[Any]) -> dict[Any, Any]:
    # A to-many join returns a row once per match, and only its annotations can differ.
    answers: dict[Any, Any] = {}
    for row in rows:
        first = answers.setdefault(row.pk, row)
        if row is not first:
            _refuse_two_answers(question, first, row, _added(question))
    return answers


def _added(question: Question[Any]) -> list[str]:
    query = question.queryset.query
    return [*query.annotation_select, *query.extra_select]


def _refuse_two_answers(
    question: Question[Any], first: Any, row: Any, added: Iterable[str]
) -> None:
    for name in added:
        if getattr(row, name) != getattr(first, name):
            raise InvalidPending(
                f"{question.model._meta.label}: expected pending to return each row once, got row "
                f"{row.pk} several times with different values of {name!r}; aggregate that value, "
                "or compute it in a subquery."
            )
