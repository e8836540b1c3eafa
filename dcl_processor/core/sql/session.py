"""One session, and the steps that a delivery takes on it: with Django's querysets, one by one.

This path serves MariaDB, MySQL, SQLite, psycopg2, Django's ``TestCase``, and the models and keys
for which ``messages`` has no statements. ``messages`` takes the same steps on PostgreSQL.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from django.db import Error, connections, transaction
from django.db.models import Model, QuerySet

from dcl_processor.core.pending.question import Question, these
from dcl_processor.core.report.exceptions import (
    InvalidPending,
    ProcessorError,
    SessionLost,
    TransactionLost,
)
from dcl_processor.core.report.values import Values, resolve
from dcl_processor.core.sql import isolation

_FENCE = "dcl_fence"

#: Values, and the keys of the rows that they are written to.
Writes = Sequence[tuple[Values, Sequence[Any]]]


@dataclass(frozen=True, slots=True)
class Wanted:
    """The rows that a claim may take: the first ``limit`` of them that are free."""

    pks: Sequence[Any]
    limit: int

    @property
    def may_choose(self) -> bool:
        return self.limit < len(self.pks)


@dataclass(slots=True)
class Claimed:
    """What a claim got, in the order of the candidates: instances by their keys.

    ``visited``: the candidates that it came to; ``locked``: those that it could lock, and that are
    not pending any more unless they are among the rows. ``before`` and ``after``: of rows with a
    mark, the marked columns before and after the claim.
    """

    rows: dict[Any, Any]
    visited: Sequence[Any]
    locked: Collection[Any] = ()
    before: Mapping[Any, Values] = field(default_factory=dict)
    after: Mapping[Any, Values] = field(default_factory=dict)


class Session:
    """The connection of one run, and the transaction that is open on it, if one is."""

    def __init__(self, using: str, label: str) -> None:
        self.using, self.label = using, label
        self.connection: Any = connections[using]
        self._block: Any = None

    @property
    def is_open(self) -> bool:
        """Whether a transaction with locks is open."""
        return self._block is not None

    # --- a transaction with locks

    def claim(self, question: Question[Any], wanted: Wanted, _: Any = ()) -> Claimed:
        """Open a transaction, and lock the wanted rows that are still pending in it."""
        try:
            self.begin()
            if not self.connection.features.has_select_for_update:
                lock_database(question)
                return self._checked(question, wanted.pks, wanted.pks)
            if question.own_table:
                # Race: double claim. The lock and the second check are one statement, which checks
                # the locked row's newest version.
                rows = list(locking(question.among(wanted.pks)))
                return Claimed(by_key(question, rows, wanted.pks), wanted.pks)
            # Race: stale second check. The snapshot of the locking statement is older than the
            # lock; the second statement has one of its own.
            ours = self._with_keys(question, lock_parts(question, wanted.pks))
            return self._checked(question, wanted.pks, ours)
        except BaseException:
            self.rollback()
            raise

    def _with_keys(self, question: Question[Any], pks: list[Any]) -> list[Any]:
        """Lock the keys of rows that are locked; return the rows whose keys are ours."""
        is_needed = self.connection.features.has_select_for_update and question.lock_key
        if not is_needed or question.lock_key is None or question.key is None or not pks:
            return pks
        keys = dict(question.table.filter(these(pks)).values_list("pk", question.key))
        sql = f"SELECT {question.lock_key('%s')}"
        ours = {
            key: self.execute(sql, [str(key)] * sql.count("%s"))[0][0]
            for key in {*keys.values()} - {None}
        }
        return [pk for pk in pks if ours.get(keys[pk], True)]

    def _checked(self, question: Question[Any], pks: Sequence[Any], ours: Sequence[Any]) -> Claimed:
        rows = list(question.among(ours)) if ours else []
        return Claimed(by_key(question, rows, pks), pks, ours)

    def begin(self) -> None:
        """Open a transaction at READ COMMITTED, with a fence that shows whether it has ended."""
        self._block = isolation.begin(self.using, self.label)
        self.execute(f"SAVEPOINT {_FENCE}")

    def execute(self, sql: str, params: Sequence[Any] | None = None) -> Any:
        with self.connection.cursor() as cursor:
            cursor.execute(sql, params)
            return cursor.fetchall() if cursor.description else cursor.rowcount

    def check(self) -> None:
        """Raise ``TransactionLost`` if the transaction with the locks is known to have ended."""
        connection = self.connection
        if connection.closed_in_transaction or connection.connection is None:
            raise TransactionLost from SessionLost()
        in_transaction = getattr(connection.connection, "in_transaction", True)
        if connection.vendor == "sqlite" and not in_transaction:
            raise TransactionLost

    def write(self, question: Question[Any], writes: Writes) -> None:
        """Write these columns and nothing else, by primary key, in the open transaction.

        Never ``save()``, which would overwrite columns that another session has changed since.
        """
        for values, pks in writes:
            if not values:
                continue
            written = question.table.filter(these(pks)).update(**resolve(values))
            # A query is needed, because rows that the handler deleted have left pending, too.
            if written < len(pks) and question.table.filter(these(pks)).count() > written:
                raise not_written(self.label, pks)

    def commit(self, question: Question[Any], writes: Writes) -> None:
        """Write the flips, and commit; nothing of the transaction is kept if that raises."""
        # Race: flip without work. If the transaction has ended, the lock and the work are lost,
        # and the next transaction would contain the flip alone.
        try:
            self.execute(f"RELEASE SAVEPOINT {_FENCE}")
        except Error as error:
            raise TransactionLost from error
        self.write(question, writes)
        make_callbacks_robust(self.connection)
        block, self._block = self._block, None
        block.__exit__(None, None, None)

    def rollback(self) -> None:
        """End the transaction that is open, if one is; its callbacks never run."""
        block, self._block = self._block, None
        connection = self.connection
        if block is not None and connection.in_atomic_block:
            connection.needs_rollback = True
            with suppress(Error, transaction.TransactionManagementError):
                block.__exit__(None, None, None)
        if block is not None and not isolation.in_test_case(connection):
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
        self, question: Question[Any], wanted: Wanted, mark: Values, _: Any = ()
    ) -> Claimed:
        """Claim the rows, write the mark to those that are still pending, and commit."""
        claimed = self.claim(question, wanted)
        self.mark(question, claimed, mark)
        return claimed

    def mark(self, question: Question[Any], claimed: Claimed, mark: Values) -> None:
        """Mark the rows that are locked in the open transaction, and commit."""
        try:
            if claimed.rows:
                table = question.table.filter(these(claimed.rows))
                names = [*mark]
                claimed.before = _read(table, names)
                table.update(**mark)
                claimed.after = _read(table, names)
                for pk, row in claimed.rows.items():
                    show(row, claimed.after[pk])
            self.commit(question, ())
        except BaseException:
            self.rollback()
            raise

    def settle(self, question: Question[Any], pk: Any, expected: Values, values: Values) -> bool:
        """Write to a row if it still has its mark; return whether it had it."""
        tables = [table for table in _written_tables(question, values)]
        if len(tables) == 1 and tables[0] is question.model:
            return bool(compare_and_set(question, pk, expected, values))
        # Race: lost lease that writes. Django writes to several tables with a SELECT and an UPDATE
        # for each. Without the lock another worker could take the row in between.
        with isolation.read_committed(self.using, self.label):
            for table in tables:
                list(locking(_part(question, table, [pk]), waits=True))
            return bool(compare_and_set(question, pk, expected, values))

    def was_committed(self) -> bool:
        """Return whether the last transaction was committed although an error came, if known."""
        return False


# --- the locks


def locking(rows: QuerySet[Any, Any], *, waits: bool = False) -> QuerySet[Any, Any]:
    """Lock a queryset's rows, as narrowly as the database can, and pass those that are locked."""
    features = connections[rows.db].features
    if not features.has_select_for_update:
        return rows
    skips = features.has_select_for_update_skip_locked and not waits
    return rows.select_for_update(
        skip_locked=skips,
        nowait=not skips and not waits and features.has_select_for_update_nowait,
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


def lock_parts(question: Question[Any], pks: Sequence[Any]) -> list[Any]:
    """Lock the rows by their keys, with their parts in parents' tables; return those locked."""
    ours = list(pks)
    # Race: lock on joined rows. These statements join no table.
    for table in question.tables:
        if table is question.model:
            columns = [each.attname for each in table._meta.pk_fields]
            rows = QuerySet[Any](table, using=question.using).filter(these(ours)).order_by()
            found = {*locking(rows.values_list(*columns))}
            ours = [pk for pk in ours if (pk if isinstance(pk, tuple) else (pk,)) in found]
        else:
            keys = dict(
                question.table.filter(these(ours)).values_list("pk", _path_to(question, table))
            )
            part = QuerySet[Any](table, using=question.using).filter(pk__in=[*keys.values()])
            held = {*locking(part.order_by().values_list("pk", flat=True))}
            ours = [pk for pk in ours if keys.get(pk) in held]
        if not ours:
            break
    return ours


def _part(question: Question[Any], table: type[Model], pks: Sequence[Any]) -> QuerySet[Any, Any]:
    rows = QuerySet[Any](table, using=question.using).order_by()
    if table is question.model:
        return rows.filter(these(pks)).values_list(*[f.attname for f in table._meta.pk_fields])
    keys = question.table.filter(these(pks)).values_list(_path_to(question, table), flat=True)
    return rows.filter(pk__in=[*keys]).values_list("pk", flat=True)


def _path_to(question: Question[Any], table: type[Model]) -> str:
    steps = question.model._meta.get_path_to_parent(table)
    return "__".join([*(each.join_field.name for each in steps), "pk"])


def _written_tables(question: Question[Any], values: Values) -> list[type[Model]]:
    fields = [f for f in question.model._meta.concrete_fields if {f.name, f.attname} & {*values}]
    tables = {question.model, *(each.model._meta.concrete_model for each in fields)}
    # In the order in which save() writes them, parents first, so that there is no deadlock.
    return [
        each
        for each in (*reversed(question.model._meta.all_parents), question.model)
        if each in tables
    ]


# --- the rows


def by_key(question: Question[Any], rows: Sequence[Any], pks: Sequence[Any]) -> dict[Any, Any]:
    """Return the rows by their keys, in the order of the candidates."""
    answers: dict[Any, Any] = {}
    for row in rows:
        first = answers.setdefault(row.pk, row)
        for name in question.annotations if row is not first else ():
            if getattr(row, name) != getattr(first, name):
                raise InvalidPending(
                    f"{question.model._meta.label}: expected pending to return each row once, got "
                    f"row {row.pk} several times with different values of {name!r}; aggregate that "
                    "value, or compute it in a subquery."
                )
    return {pk: answers[pk] for pk in pks if pk in answers}


def show(row: Any, values: Values) -> None:
    """Let the instance have the row's values, so that the handler's ``save()`` keeps them."""
    known = vars(row)
    known.update({name: value for name, value in values.items() if name in known})


def _read(rows: QuerySet[Any, Any], names: Sequence[str]) -> dict[Any, Values]:
    return {pk: dict(zip(names, some, strict=True)) for pk, *some in rows.values_list("pk", *names)}


def compare_and_set(question: Question[Any], pk: Any, expected: Values, values: Values) -> int:
    """Write to a row if it has the expected values; a list: one of these."""
    rows = question.table.filter(pk=pk)
    for name, value in expected.items():
        rows = rows.filter(**{f"{name}__in" if isinstance(value, list) else name: value})
    return rows.update(**resolve(values))


def make_callbacks_robust(connection: Any) -> None:
    """The rows are settled when ``on_commit()`` callbacks run: one that raises is logged."""
    calls = connection.run_on_commit
    if calls:
        connection.run_on_commit = [(sids, call, True) for sids, call, _ in calls]


def not_written(label: str, pks: Sequence[Any]) -> ProcessorError:
    """Return the error for rows that exist and that an update has left out."""
    one = len(pks) == 1
    named = f"row {pks[0]}" if one else f"rows {', '.join(map(str, pks[:5]))} and others"
    got = "it not written although it exists" if one else "fewer written than exist"
    return ProcessorError(
        f"{label}: expected the update to write {named}, got {got}; look for a trigger, a rule or "
        "row-level security that drops the update."
    )
