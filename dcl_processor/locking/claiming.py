"""Stage 2: lock the rows, and check them again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Generic, TypeVar

from django.db import connections
from django.db.models import Model, Q, QuerySet
from django.db.models.constants import LOOKUP_SEP

from dcl_processor.candidates.question import KeyList, Question, RowFilter, these
from dcl_processor.compiled_sql.select import CompiledSelect
from dcl_processor.database.transaction_id import NAME, with_transaction_id
from dcl_processor.exceptions import InvalidPending

from .engines import refuse_without_transactions
from .row_transactions import RowTransactions
from .wanted import Wanted

M = TypeVar("M", bound=Model)
R = TypeVar("R")

#: SQL, and its parameters.
Statement = tuple[str, Sequence[Any]]


class Miss(Enum):
    """Why a candidate was not claimed."""

    #: Not in the answer: locked by another session, finished, or gone. A lock-free read shows
    #: which.
    ABSENT = "absent"
    #: The claim locked it, and it was no longer pending, or gone.
    STALE = "stale"
    #: It failed in another worker of the same run.
    TRIED = "tried"
    #: The handler was called for its key in another worker of the same run.
    CALLED = "called"
    #: Another session has its key locked.
    KEY_LOCKED = "key locked"
    #: As many rows of its key as may be are in flight, or in doubt.
    KEY_IN_USE = "key in use"
    #: Another row of its key comes first.
    NOT_FIRST = "not first"


@dataclass(frozen=True, slots=True)
class Claimed(Generic[M]):
    """The claimed rows by primary key, in the order of the candidates, and why others are missing.

    ``transaction_id``: of the transaction that has the locks, if the database reports it.
    """

    rows: dict[Any, M]
    misses: dict[Any, Miss]
    transaction_id: str | None = None


@dataclass(frozen=True, slots=True)
class _Locked:
    """The keys of the locked rows, and the transaction that has their locks."""

    pks: list[Any]
    transaction_id: str | None = None


def claim(
    question: Question[M], wanted: Wanted, transactions: RowTransactions | None = None
) -> Claimed[M]:
    """Lock the wanted rows, and return them as read under their locks.

    If it may choose, the result does not mention the rows behind the last one that was taken.
    Never waits for a lock, if the database supports that. Runs inside the transaction that
    the rows are handled or marked in. ``transactions``: sends several statements as one message, if
    the driver can. Raises ``InvalidPending`` when the question has several
    answers for one row, and ``Unsupported`` when a table has no transactions.
    """
    connection = connections[question.using]
    if connection.vendor == "mysql":
        refuse_without_transactions(question)
    if not connection.features.has_select_for_update:
        return _claim_database(question, wanted.pks)
    if question.own_table:
        return _claim_own(question, wanted)
    claimed = None
    if transactions is not None and transactions.can_wait:
        claimed = _claim_together(question, wanted, transactions)
    return _claim_spanning(question, wanted) if claimed is None else claimed


def _claim_own(question: Question[M], wanted: Wanted) -> Claimed[M]:
    asked = partial(_asked_locking, question, wanted)
    found = {row.pk: row for row in _select(question, ("claim", wanted.choice), wanted.pks, asked)}
    # Removed before a handler sees it, because it is not a column.
    ids = [vars(row).pop(NAME, None) for row in found.values()]
    locked = _Locked([], ids[0] if ids else None)
    if len(found) == len(wanted.pks) == 1:
        return Claimed(found, {}, locked.transaction_id)
    return _claimed(wanted.visited(found), found, locked)


def _asked_locking(question: Question[Any], wanted: Wanted, rows: RowFilter) -> QuerySet[Any, Any]:
    # Race: double claim. Another worker may have finished a row since its key was read. The
    # lock and the second check are one statement, which checks the locked row's newest version.
    locking = _locking(question.narrowed(rows), question.using)
    return wanted.first(with_transaction_id(locking, question.using), rows)


def statements(question: Question[Any], wanted: Wanted) -> list[Statement]:
    """Return the statements that ``claim()`` would send if it could lock all the rows.

    Compiles them, and locks nothing; runs inside a transaction, as ``claim()`` does.
    """
    connection, pks = connections[question.using], wanted.pks
    again = (question, ("ask", None), pks, _asked(question, pks))
    if not connection.features.has_select_for_update:
        return [(_database_lock(question), ()), _statement(*again)]
    if question.own_table:
        asked = partial(_asked_locking, question, wanted)
        return [_statement(question, ("claim", wanted.choice), pks, asked)]
    own, *parents = question.tables
    locks = [
        _statement(question, (own, wanted.choice), pks, partial(_parts, question, own, wanted))
    ]
    for parent in parents:
        keys = [*parent_keys(question, parent, pks).values()]
        parts = partial(_parts, question, parent, Wanted(keys))
        locks += [_statement(question, (parent, None), keys, parts)] if keys else []
    return [*locks, _statement(*again)]


def lock_free(
    question: Question[Any], pks: Sequence[Any], tables: Sequence[type[Model]] = ()
) -> list[Any]:
    """Lock those of the rows that are not locked, and return their keys; checks nothing else.

    ``tables``: those that are to be written; the parts of the rows in parents' tables are locked,
    too. A database without row locks is locked as a whole.
    """
    if not connections[question.using].features.has_select_for_update:
        lock_database(question)
        return list(pks)
    locked = _lock(question, question.model, Wanted(pks))
    for table in tables:
        if table is not question.model:
            locked = _lock(question, table, Wanted(locked.pks))
    return locked.pks


def _claim_spanning(question: Question[M], wanted: Wanted) -> Claimed[M]:
    own, *parents = question.tables
    locked = _lock(question, own, wanted)
    pks = wanted.visited(locked.pks)
    for table in parents:
        locked = _lock(question, table, Wanted(locked.pks))
    # Race: stale second check. The lock statement's snapshot is older than the lock, and joined
    # rows would be read from that snapshot. A separate statement sees what was committed since.
    return _claimed(pks, _answers(question, locked.pks), locked)


def _claim_together(
    question: Question[M], wanted: Wanted, transactions: RowTransactions
) -> Claimed[M] | None:
    """Lock and check again in one message; ``None`` if the check has to wait for the locks."""
    own, *parents = question.tables
    if parents or wanted.choice is not None:
        return None
    pks, asked = wanted.pks, _asked(question, wanted.pks)
    lock = _compiled(question, (own, None), pks, partial(_parts, question, own, wanted))
    ask = _compiled(question, ("ask", None), pks, asked)
    if lock is None or ask is None:
        return None
    # Race: stale second check. These are two statements, each with a snapshot of its own, although
    # they are one message. The second also answers for rows that the first could not lock.
    answered = transactions.answers([lock.statement(pks), ask.statement(pks)])
    if answered is None:
        return None
    locks, answers = answered
    locked = _held(question, own, dict(zip(pks, pks, strict=True)), lock.build(locks))
    found = _by_key(question, ask.build(answers))
    return _claimed(pks, {pk: found[pk] for pk in locked.pks if pk in found}, locked)


def _claim_database(question: Question[M], pks: Sequence[Any]) -> Claimed[M]:
    lock_database(question)
    # Race: double claim. Another worker may have finished a row before this lock was taken.
    return _claimed(pks, _answers(question, pks), _Locked(list(pks)))


def lock_database(question: Question[Any]) -> None:
    """Take the only lock of a database without row locks."""
    # SQLite has one lock, for writing, and grants it at once only to a transaction that begins with
    # a write, here an update that matches no row. After a read, the later write could fail.
    with connections[question.using].cursor() as cursor:
        cursor.execute(_database_lock(question))


def _database_lock(question: Question[Any]) -> str:
    connection = connections[question.using]
    table = connection.ops.quote_name(question.model._meta.db_table)
    key: Any = question.model._meta.pk_fields[0]
    column = connection.ops.quote_name(key.column)
    return f"UPDATE {table} SET {column} = {column} WHERE 1 = 0"  # noqa: S608  # quoted


def _claimed(pks: Sequence[Any], found: dict[Any, M], locked: _Locked) -> Claimed[M]:
    return Claimed(
        rows={pk: found[pk] for pk in pks if pk in found},
        misses={
            pk: Miss.STALE if pk in locked.pks else Miss.ABSENT for pk in pks if pk not in found
        },
        transaction_id=locked.transaction_id,
    )


def _lock(
    question: Question[Any],
    table: type[Model],
    wanted: Wanted,
) -> _Locked:
    """Lock the rows' parts in one table, their own or a parent's; return the locked ones.

    It may choose only among rows of their own table.
    """
    pks = wanted.pks
    if not pks:
        return _Locked([])
    keys = dict(zip(pks, pks, strict=True))
    if table is not question.model:
        keys = parent_keys(question, table, pks)
    parts = partial(_parts, question, table, wanted)
    return _held(
        question, table, keys, _select(question, (table, wanted.choice), [*keys.values()], parts)
    )


def _parts(
    question: Question[Any], table: type[Model], wanted: Wanted, named: RowFilter
) -> QuerySet[Any, Any]:
    """Return the statement that locks the rows' parts in one table."""
    # Race: lock on joined rows. This statement joins no table: it has the row's keys alone, not
    # the question, and no order, because the model's own may join rows that would be locked.
    # An instance would run the model's own code for a row that is not used.
    # With a choice, the question is added as a hint, like the read before it, and not as the
    # check: it avoids useless locks of rows that were finished before this statement.
    asked = named.condition
    if wanted.choice is not None:
        asked = Q(pk__in=question.narrowed(named).values("pk"))
    rows = QuerySet[Any](table, using=question.using).filter(asked).order_by()
    # The id comes last, behind the columns of the key.
    locking = with_transaction_id(
        _locking(rows.values_list(*_key_columns(table)), question.using), question.using
    )
    return wanted.first(locking, named)


def _key_columns(table: type[Model]) -> list[str]:
    # By column, because Django cannot resolve OF for a composite key as a whole.
    return [field.attname for field in table._meta.pk_fields]


def _held(
    question: Question[Any], table: type[Model], keys: Mapping[Any, Any], locked: Sequence[Any]
) -> _Locked:
    """Return the rows whose parts were locked; ``keys``: the parts' keys, by the rows' own."""
    number = len(_key_columns(table))
    held = {row[:number] if number > 1 else row[0] for row in locked}
    transaction_id = next((row[number] for row in locked if len(row) > number), None)
    ours = {pk for pk, key in keys.items() if key in held}
    if table is not question.model and len(ours) < len(held):
        ours |= _spelled_otherwise(question, table, held.difference(keys.values()))
    return _Locked([pk for pk in keys if pk in ours], transaction_id)


def _spelled_otherwise(
    question: Question[Any], parent: type[Model], held: Collection[Any]
) -> set[Any]:
    """Return the rows with these parts in a parent's table, for a collation that ignores case."""
    rows = QuerySet[Any](question.model, using=question.using)
    named = rows.filter(**{f"{_path_to(question.model, parent)}__in": held})
    return set(named.values_list("pk", flat=True))


def _path_to(model: type[Model], parent: type[Model]) -> str:
    return LOOKUP_SEP.join(step.join_field.name for step in model._meta.get_path_to_parent(parent))


def parent_keys(question: Question[Any], parent: type[Model], pks: Sequence[Any]) -> dict[Any, Any]:
    """Return the keys of the rows' parts in a parent's table, by the rows' own keys."""
    steps = question.model._meta.get_path_to_parent(parent)
    if all(step.join_field.primary_key for step in steps):
        return dict(zip(pks, pks, strict=True))
    # A separate query, because MariaDB would lock the rows of a subquery as well. The answer stays
    # valid, because nothing moves a row to another parent.
    rows = QuerySet[Any](question.model, using=question.using).filter(these(pks))
    return dict(rows.values_list("pk", _path_to(question.model, parent)))


def _locking(queryset: QuerySet[Any, R], using: str) -> QuerySet[Any, R]:
    """Add the narrowest lock that the database has, with the option that waits least."""
    features = connections[using].features
    skip_locked = features.has_select_for_update_skip_locked
    # With one table OF is left out, because PostgreSQL accepts no schema-qualified name in it.
    query = queryset.query
    several = sum(map(bool, query.alias_refcount.values())) > 1
    joins = several or query.extra_tables or query.select_related
    return queryset.select_for_update(
        skip_locked=skip_locked,
        nowait=not skip_locked and features.has_select_for_update_nowait,
        # In case a statement joins a table after all: its rows stay free for other sessions.
        of=("self",) if joins and features.has_select_for_update_of else (),
        # The lock that an UPDATE of plain columns takes: other sessions can insert child rows.
        no_key=features.has_select_for_no_key_update,
    )


def _answers(question: Question[M], pks: Sequence[Any]) -> dict[Any, M]:
    """Check the locked rows against the whole question, and return those that match."""
    if not pks:
        return {}
    return _by_key(question, _select(question, ("ask", None), pks, _asked(question, pks)))


def _asked(question: Question[M], pks: Sequence[Any]) -> Callable[[RowFilter], QuerySet[Any, M]]:
    # A to-many join returns a row once per match, and only its annotations can differ.
    most = None if _added(question) or len(pks) > 1 else 1
    return lambda rows: question.narrowed(rows)[:most]


def _added(question: Question[Any]) -> list[str]:
    query = question.queryset.query
    return [*query.annotation_select, *query.extra_select]


def _by_key(question: Question[M], rows: Iterable[M]) -> dict[Any, M]:
    answers: dict[Any, M] = {}
    added = _added(question)
    for row in rows:
        first = answers.setdefault(row.pk, row)
        _refuse_two_answers(question, first, row, added)
    return answers


def _select(
    question: Question[Any],
    name: tuple[str | type[Model], tuple[int, bool] | None],
    pks: Sequence[Any],
    ask: Callable[[RowFilter], QuerySet[Any, R]],
) -> list[R]:
    """Select rows by their keys, by a statement that is compiled once per window if possible."""
    select = _compiled(question, name, pks, ask)
    return list(ask(KeyList(pks))) if select is None else select.execute(pks)


def _statement(
    question: Question[Any],
    name: tuple[str | type[Model], tuple[int, bool] | None],
    pks: Sequence[Any],
    ask: Callable[[RowFilter], QuerySet[Any, Any]],
) -> Statement:
    """Return the statement that ``_select()`` executes."""
    select = _compiled(question, name, pks, ask)
    if select is not None:
        return select.statement(pks)
    compiled: Statement = ask(KeyList(pks)).query.get_compiler(question.using).as_sql()
    return compiled


def _compiled(
    question: Question[Any],
    name: tuple[str | type[Model], tuple[int, bool] | None],
    pks: Sequence[Any],
    ask: Callable[[RowFilter], QuerySet[Any, R]],
) -> CompiledSelect[R] | None:
    many = len(pks) > 1
    model = question.model if isinstance(name[0], str) else name[0]
    make = partial(CompiledSelect, model, question.using, ask, many=many)
    select: CompiledSelect[R] | None = question.statements.get((name, many), make)
    return select


def _refuse_two_answers(
    question: Question[Any], first: Any, row: Any, added: Iterable[str]
) -> None:
    for name in added:
        if row is not first and getattr(row, name) != getattr(first, name):
            raise InvalidPending(
                f"{question.model._meta.label}: expected pending to return each row once, got row "
                f"{row.pk} several times with different values of {name!r}; aggregate that value, "
                "or compute it in a subquery."
            )
